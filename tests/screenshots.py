"""Makes docs/page-*.png, real conversations on the web page, docs/screenshots/, each state of the page, and
docs/operator-*.png, the operator's page under a real load: light, dark and on a phone; see `make screenshots`."""

import io
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from openai import OpenAI
from PIL import Image
from playwright.sync_api import Browser, FilePayload, Page, expect

from raylens.checkpoints import BUNDLED_MODEL, PICTURES
from raylens.deployments.config import AppConfig
from raylens.deployments.endpoint.api_keys import add_key
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import running_app
from tests.background import Background
from tests.chromium import chromium
from tests.deployments.endpoint.test_page_markdown import RICH
from tests.page_driver import answer_with, ask, bring_in, open_list, open_page, openai_error, pick, send, turn
from tests.pictures import disc, encoded, user_message

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
    page.locator("#scroll").evaluate("(node) => node.scrollTo(0, node.scrollHeight)")
    page.locator("#question").focus()


# Each state of the page, with answers that are made up


def markdown(page: Page) -> None:
    answer_with(page, RICH)
    send(page, "What does it say?")
    expect(page.locator(".maths .katex").last).to_be_visible()
    page.locator("#scroll").evaluate("(node) => node.scrollTo(0, 330)")


def broken_off(page: Page) -> None:
    answer_with(page, "The invoice has **three** items, and the total is", reason=None)
    send(page, "What is the total?")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()


def several_answers(page: Page) -> None:
    bring_in(page, turn("What is the total?", "It is 48 €."))
    answer_with(page, "The total is 48.60 €, taxes included.")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".versions")).to_contain_text("2 of 2")


def as_code(page: Page) -> None:
    pick(page, PICTURES / "one.png")
    ask(page, DESCRIBE)
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Show as code").click()
    page.get_by_role("button", name="Python").click()


def sign_in(page: Page) -> None:
    page.route("**/v1/models", lambda route: route.fulfill(**openai_error(401, "no API key was sent")))
    page.reload()
    expect(page.get_by_role("dialog", name="Sign in")).to_be_visible()


def settings(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()


def conversations(page: Page) -> None:
    for question in ("What is on the receipt?", "Which bird is this?", "Describe the chart."):
        bring_in(page, turn(question))
    open_list(page)


def too_large(page: Page) -> None:
    file = FilePayload(name="scan.png", mimeType="image/png", buffer=b"\x89PNG\r\n\x1a\n" + bytes(21 * 2**20))
    page.locator("#media-files").set_input_files(file)
    expect(page.locator(".notice")).to_be_visible()


STATES = (markdown, broken_off, several_answers, as_code, sign_in, settings, conversations, too_large)
SCREENS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1360, "height": 800}},
    "dark": {"viewport": {"width": 1360, "height": 800}, "color_scheme": "dark"},
    "phone": {
        "viewport": {"width": 360, "height": 740},
        "device_scale_factor": 2,
        "is_mobile": True,
        "has_touch": True,
    },
}


def shoot_states(browser: Browser, url: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for state in STATES:
        for screen, options in SCREENS.items():
            context = browser.new_context(**options)
            page = open_page(context, url)
            state(page)
            page.wait_for_timeout(300)
            taken = Image.open(io.BytesIO(page.screenshot()))
            taken.convert("RGB").quantize(64).save(folder / f"{state.__name__}-{screen}.png", optimize=True)
            context.close()


def shoot_all(url: str, folder: Path) -> None:
    with chromium() as browser:
        for shot in SHOTS:
            shoot(browser, url, shot, folder)
        shoot_states(browser, url, folder / "screenshots")


# The operator's page

KEYS = ("shop", "support", "app")
OPERATOR_SHOTS = (
    Shot("operator-light.png", "light", (1280, 900), 1.5),
    Shot("operator-dark.png", "dark", (1280, 900), 1.5),
    Shot("operator-phone.png", "light", (360, 812), 2),
)
CLIENTS = 10
LOAD_SECONDS = 90
"""How long the load has gone on when the pictures are taken."""


def load(url: str, key: str, number: int) -> Background:
    """A client that asks about a few pictures, most of them again and again, for long answers, with pauses."""
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=3, timeout=60)
    chance = random.Random(number)

    def ask_on() -> None:
        while not work.is_over.wait(chance.choice((0, 0, 0.1, 0.1 * number, 2))):
            side = chance.choice((96, 128, 160, chance.randrange(96, 224)))
            colour = chance.choice(("red", "green", "blue"))
            length: dict[str, Any] = {"max_tokens": chance.randrange(200, 1500), "extra_body": {"ignore_eos": True}}
            message = user_message(DESCRIBE, encoded(disc(colour, (side, side))))
            client.chat.completions.create(model="shapes", messages=[message], **length)

    work = Background(ask_on)
    return work


def shoot_operator(url: str, admin: str, keys: list[str], folder: Path) -> None:
    with chromium() as browser, ExitStack() as loads:
        for number in range(CLIENTS):
            loads.enter_context(load(url, keys[number % len(keys)], number))
        pages = []
        for shot in OPERATOR_SHOTS:
            width, height = shot.size
            context = browser.new_context(
                color_scheme=shot.scheme,
                viewport={"width": width, "height": height},
                device_scale_factor=shot.scale,
                extra_http_headers={"authorization": f"Bearer {admin}"},
            )
            pages.append(context.new_page())
            pages[-1].goto(f"{url}/dashboard")
        time.sleep(LOAD_SECONDS)
        for shot, page in zip(OPERATOR_SHOTS, pages, strict=True):
            expect(page.locator("#state")).to_have_text("Live")
            page.screenshot(path=folder / shot.file, full_page=True)


def main() -> None:
    config: dict[str, Any] = {"model": str(BUNDLED_MODEL)}
    with running_app(AppConfig.model_validate(config), host="127.0.0.1", port=free_port()) as url:
        shoot_all(url, ROOT / "docs")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "keys.yaml"
        admin, *others = (add_key(file, name, is_admin=name == "operator") for name in ("operator", *KEYS))
        config |= {
            "auth": {"keys_file": str(file)},
            "shared": {"processor_cache_bytes": 2**26, "embedding_cache_bytes": 2**24},
            "generate": {"min_replicas": 2, "max_replicas": 2, "engine": {"kv_cache_bytes": 2**24}},
        }
        with running_app(AppConfig.model_validate(config), host="127.0.0.1", port=free_port()) as url:
            shoot_operator(url, admin, others, ROOT / "docs")


if __name__ == "__main__":
    main()
