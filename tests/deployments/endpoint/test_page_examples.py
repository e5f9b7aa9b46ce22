"""The examples on the empty page, and the route that they come from."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import BrowserContext, Page, expect

from raylens.checkpoints import PICTURES
from raylens.deployments.endpoint.page_route import read_examples
from tests.page_driver import content_of, open_page, pick, picture_url, sent_bodies

pytest_plugins = ("tests.page_fixtures",)


def test_the_examples_are_served_like_the_page(app_url: str) -> None:
    response = httpx.get(f"{app_url}/examples")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.json() == read_examples(PICTURES)
    again = httpx.get(f"{app_url}/examples", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(f"{app_url}/examples", headers={"host": "example.com"}).status_code == 403
    assert httpx.get(f"{app_url}/examples/one.png").status_code == 404
    assert "/examples" not in httpx.get(f"{app_url}/openapi.json").json()["paths"]


def test_each_set_of_pictures_has_one_question() -> None:
    examples = read_examples(PICTURES)
    assert [(example["question"], len(example["pictures"])) for example in examples] == [
        ("What colour is the cross?", 1),
        ("Where is the pink diamond?", 1),
        ("What is in the second image?", 3),
        ("Describe the third image.", 3),
    ]
    assert examples[0]["pictures"] == [picture_url(PICTURES / "one.png")]


def test_only_pictures_that_are_there_are_offered(tmp_path: Path) -> None:
    assert read_examples(tmp_path) == []
    for name in ("questions.json", "one.png", "three.png"):
        shutil.copy(PICTURES / name, tmp_path)
    assert [example["question"] for example in read_examples(tmp_path)] == ["What colour is the cross?"]


def test_an_example_is_asked(page: Page) -> None:
    examples = page.get_by_role("list", name="Examples").get_by_role("button")
    expect(examples).to_have_count(4)
    answers = {entry["question"]: entry["answer"] for entry in json.loads((PICTURES / "questions.json").read_text())}
    examples.filter(has_text="Where is the pink diamond?").click()
    expect(page.locator("#question")).to_have_value("Where is the pink diamond?")
    expect(page.locator("#question")).to_be_focused()
    examples.filter(has_text="What is in the second image?").press("Enter")
    expect(page.locator("#question")).to_have_value("What is in the second image?")
    expect(page.locator("#attached img")).to_have_count(3)
    bodies = sent_bodies(page)
    page.press("#question", "Enter")
    expect(page.locator(".measures")).to_have_count(1)
    assert page.locator("article.assistant .content").inner_text() == answers["What is in the second image?"]
    urls = [part["image_url"]["url"] for part in bodies[0]["messages"][0]["content"][:-1]]
    assert urls == [picture_url(PICTURES / f"{name}.png") for name in ("three", "four", "five")]
    expect(examples.first).to_be_hidden()


def test_an_example_leaves_what_the_reader_wrote(page: Page, red: Path) -> None:
    pick(page, red)
    page.fill("#question", "My own question")
    for name in ("What colour is the cross?", "Where is the pink diamond?"):
        page.get_by_role("button", name=name).click()
        expect(page.locator("#question")).to_have_value("My own question")
        expect(page.locator("#attached img")).to_have_count(2)
    assert content_of(page.locator("#attached img").first) == picture_url(red)
    assert content_of(page.locator("#attached img").last) == picture_url(PICTURES / "two.png")


def test_a_page_without_examples_works(context: BrowserContext, page: Page, app_url: str) -> None:
    troubles: list[dict[str, Any]] = [{"status": 404}, {"json": []}]
    context.route("**/examples", lambda route: route.fulfill(**troubles.pop()))
    while troubles:
        page = open_page(context, app_url)
        expect(page.locator("#welcome")).to_be_visible()
        expect(page.get_by_role("list", name="Examples")).to_be_hidden()
