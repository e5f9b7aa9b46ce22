"""axe-core's view of a page, light and dark."""

from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.page_driver import PHONE

SCREENS: dict[str, dict[str, Any]] = {
    "desktop": {},
    "phone": {"viewport": PHONE, "has_touch": True, "is_mobile": True},
}
_SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
_WIDER_THAN_THEIR_PLACE = """() => [...document.querySelectorAll("html, main, dialog, .sheet, footer")]
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => `${one.tagName} scrolls sideways`)"""


def findings(page: Page) -> list[str]:
    """Returns grave violations, and all that is wider than the window, in the light and in the dark."""
    found = []
    for scheme in _SCHEMES:
        page.emulate_media(color_scheme=scheme)
        found += [f"{scheme}: {finding}" for finding in _findings_now(page)]
    return found


def _findings_now(page: Page) -> list[str]:
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
