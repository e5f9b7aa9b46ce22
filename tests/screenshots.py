"""Makes docs/page-*.png: a real conversation on the web page, light, dark and on a phone. `make screenshots` runs it."""

from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, expect

from deployments.config import AppConfig
from deployments.demo import PICTURES
from deployments.local_cluster import free_port, running_app
from tests.chromium import chromium

ROOT = Path(__file__).parent.parent
TURNS = (("two.png", "Describe the picture."), (None, "Where is the pink diamond?"))


def converse(page: Page, url: str) -> None:
    """Asks about one picture, then goes on."""
    page.goto(url)
    expect(page.locator("#health")).to_have_text("Ready")
    for number, (picture, text) in enumerate(TURNS, start=1):
        if picture is not None:
            page.set_input_files("#picture-files", PICTURES / picture)
            expect(page.locator("#attached img")).to_have_count(1)
        page.fill("#question", text)
        page.press("#question", "Enter")
        expect(page.locator(".measures")).to_have_count(number)


def shoot(
    browser: Browser, url: str, file: Path, *, scheme: Literal["light", "dark"], width: int, height: int, scale: float
) -> None:
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": height}, device_scale_factor=scale
    )
    page = context.new_page()
    converse(page, url)
    page.screenshot(path=file)
    context.close()


def shoot_all(url: str, folder: Path) -> None:
    with chromium() as browser:
        shoot(browser, url, folder / "page-light.png", scheme="light", width=1100, height=960, scale=1.5)
        shoot(browser, url, folder / "page-dark.png", scheme="dark", width=1100, height=960, scale=1.5)
        shoot(browser, url, folder / "page-phone.png", scheme="light", width=360, height=740, scale=2)


if __name__ == "__main__":
    config = AppConfig.model_validate({"model": str(ROOT / "checkpoints" / "shapes")})
    with running_app(config, host="127.0.0.1", port=free_port()) as app_url:
        shoot_all(app_url, ROOT / "docs")
