"""Fixtures that show the web page in a real Chromium, for a test module that names this one in `pytest_plugins`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.chromium import chromium
from tests.page_driver import Watch, open_page
from tests.pictures import disc, encoded


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser that has kept nothing yet."""
    context = browser.new_context()
    context.set_default_timeout(20_000)
    expect.set_options(timeout=20_000)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, app_url: str) -> Iterator[Page]:
    """The page; nothing of what it does may break its policy or leave its origin."""
    watches: list[Watch] = []
    context.on("page", lambda page: watches.append(Watch(page, app_url)))
    yield open_page(context, app_url)
    assert [complaint for watch in watches for complaint in watch.complaints] == []


@pytest.fixture
def red(tmp_path: Path) -> Path:
    return _drawn("red", tmp_path)


@pytest.fixture
def blue(tmp_path: Path) -> Path:
    return _drawn("blue", tmp_path)


def _drawn(colour: str, folder: Path) -> Path:
    """The file of a disc."""
    path = folder / f"{colour}.png"
    path.write_bytes(encoded(disc(colour, (96, 96), (36, 36))))
    return path
