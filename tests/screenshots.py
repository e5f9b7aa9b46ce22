"""Makes docs/page-*.png: real conversations on the web page, light, dark and on a phone; see `make screenshots`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, expect

from checkpoints import BUNDLED_MODEL, PICTURES
from deployments.config import AppConfig
from deployments.local_cluster import free_port, running_app
from tests.chromium import chromium
from tests.page_driver import ask, open_page, pick

ROOT = Path(__file__).parent.parent
DESCRIBE = "Describe the picture."


@dataclass(frozen=True)
class Shot:
    """A bundled picture and what is asked about it, in a window of `size` CSS pixels, each `scale` dots wide. The last
    answer's stages are unfolded. Without a picture it is the page as it begins."""

    file: str
    scheme: Literal["light", "dark"]
    size: tuple[int, int]
    scale: float
    picture: str | None = None
    questions: tuple[str, ...] = ()


SHOTS = (
    Shot("page-start.png", "light", (1000, 760), 1.5),
    Shot("page-phone.png", "light", (360, 812), 2, "five.png", (DESCRIBE,)),
    Shot("page-light.png", "light", (1000, 1090), 1.5, "two.png", (DESCRIBE, "Where is the pink diamond?")),
    Shot("page-dark.png", "dark", (1000, 1090), 1.5, "one.png", (DESCRIBE, "What colour is the cross?")),
)


def shoot(browser: Browser, url: str, shot: Shot, folder: Path) -> None:
    width, height = shot.size
    context = browser.new_context(
        color_scheme=shot.scheme, viewport={"width": width, "height": height}, device_scale_factor=shot.scale
    )
    page = open_page(context, url)
    if shot.picture is None:
        expect(page.locator(".example img").last).to_be_visible()
    else:
        pick(page, PICTURES / shot.picture)
        talk(page, shot.questions)
    page.locator("#scroll").hover()  # away from what shows that it can be pressed
    page.screenshot(path=folder / shot.file)
    context.close()


def talk(page: Page, questions: tuple[str, ...]) -> None:
    for question in questions:
        ask(page, question)
    page.locator(".measures summary").last.click()
    page.evaluate("scrollToEnd()")
    page.locator("#question").focus()


def shoot_all(url: str, folder: Path) -> None:
    with chromium() as browser:
        for shot in SHOTS:
            shoot(browser, url, shot, folder)


if __name__ == "__main__":
    config = AppConfig.model_validate({"model": str(BUNDLED_MODEL)})
    with running_app(config, host="127.0.0.1", port=free_port()) as app_url:
        shoot_all(app_url, ROOT / "docs")
