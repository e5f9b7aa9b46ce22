"""Debian's Chromium without a window, for what looks at the web page.

It is the headless shell: the whole browser takes three times the processor time for a page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    """Raises RuntimeError where it is not installed."""
    path = shutil.which("chromium-headless-shell")
    if path is None:
        raise RuntimeError("the web page needs Chromium, which is not installed; as root, `make chromium` does it")
    with sync_playwright() as playwright:
        # Its sandbox refuses to start as root; it opens nothing here but our own page.
        browser = playwright.chromium.launch(executable_path=path, chromium_sandbox=False)
        try:
            yield browser
        finally:
            browser.close()
