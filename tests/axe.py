"""axe-core's view of a page."""

from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.page_driver import PHONE

SCREENS: dict[str, dict[str, Any]] = {
    "desktop": {"color_scheme": "light"},
    "phone": {"color_scheme": "dark", "viewport": PHONE, "has_touch": True, "is_mobile": True},
}
"""Colours depend on the scheme alone, layout on the screen alone: each of both is seen once."""
_WIDER_THAN_THEIR_PLACE = """() => [...document.querySelectorAll("html, main, dialog, .sheet, footer")]
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => `${one.tagName} scrolls sideways`)"""


def findings(page: Page) -> list[str]:
    """Returns grave violations, and all that is wider than the window."""
    results = Axe().run(page).response
    assert results["testEngine"]["name"] == "axe-core"
    assert tuple(int(part) for part in results["testEngine"]["version"].split(".")[:2]) >= (4, 10)
    assert len(results["passes"]) > 10
    grave = [
        f"{violation['impact']} {violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in results["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
    wider: list[str] = page.evaluate(_WIDER_THAN_THEIR_PLACE)
    return grave + wider
