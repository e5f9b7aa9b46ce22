"""The web page sends each picture once, when it is added, and requests name it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.sync_api import BrowserContext, Page, Route, expect

from raylens.preprocess.data_url import data_url
from tests.counting_proxy import counting_proxy
from tests.page_driver import (
    QUESTION,
    ask,
    bring_in,
    history,
    open_page,
    pick,
    picture_url,
    reload,
    sent_bodies,
    turn,
)
from tests.pictures import disc

pytest_plugins = ("tests.page_fixtures",)

NUM_PHOTOS, NUM_QUESTIONS = 4, 5
LEAST_BYTES = 17_500_000


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four files of 18 MB each."""
    folder = tmp_path_factory.mktemp("photos")
    files = [folder / f"photo-{number}.jpg" for number in range(NUM_PHOTOS)]
    for file in files:
        Image.effect_noise((4080, 4080), 60).save(file, "JPEG", quality=97)
    return files


def urls_of(body: Any) -> list[str]:
    contents = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
    return [part["image_url"]["url"] for content in contents for part in content if part["type"] == "image_url"]


def file_ids(url: str) -> list[str]:
    return [file["id"] for file in httpx.get(f"{url}/v1/files").json()["data"]]


def test_four_large_photos_are_sent_once_for_five_questions(
    context: BrowserContext, app_url: str, photos: list[Path]
) -> None:
    num_bytes = sum(photo.stat().st_size for photo in photos)
    assert min(photo.stat().st_size for photo in photos) > LEAST_BYTES
    with counting_proxy(app_url) as proxy:
        page = open_page(context, proxy.url)
        pick(page, *photos)
        expect(page.locator("#attached img")).to_have_count(NUM_PHOTOS)
        ask(page, "Describe the third image.")
        for _ in range(NUM_QUESTIONS - 2):
            ask(page, "And now?")
        reload(page)
        ask(page, "And after a reload?")
        expect(page.locator(".measures")).to_have_count(NUM_QUESTIONS)
        page.close()
    assert proxy.num_sent < 1.1 * num_bytes
    print(f"{proxy.num_sent / num_bytes:.4f} of the photos' {num_bytes} bytes")


def test_requests_name_what_was_uploaded(page: Page, app_url: str, red: Path, blue: Path) -> None:
    bodies = sent_bodies(page, as_sent=True)
    before = file_ids(app_url)
    pick(page, red, blue)
    expect(page.locator("#attached img")).to_have_count(2)
    expect(page.locator("#attached progress:visible")).to_have_count(0)
    uploaded = [f"upload:{one}" for one in file_ids(app_url) if one not in before]
    assert "blue" in ask(page, "What is in the second image?")
    ask(page, "And in the first one?")
    asked = [urls_of(body) for body in bodies if body]
    assert [sorted(urls) for urls in asked] == [sorted(uploaded)] * 2
    assert asked[0] == asked[1]


@pytest.mark.parametrize("keeps_files", [True, False])
def test_the_pages_of_a_pdf_are_asked_about(page: Page, tmp_path: Path, *, keeps_files: bool) -> None:
    file = tmp_path / "discs.pdf"
    disc("red", (96, 96), (36, 36)).save(file, "PDF")
    if not keeps_files:
        page.route("**/v1/files", lambda route: route.abort())
    pick(page, file)
    expect(page.get_by_role("button", name="Open PDF 1")).to_be_visible()
    bodies = sent_bodies(page, as_sent=True)
    assert ask(page, QUESTION) == "red"
    (part, _) = bodies[0]["messages"][0]["content"]
    assert part["type"] == "file"
    assert part["file"].keys() == {"file_id" if keeps_files else "file_data"}
    content = history(page)["messages"][0]["content"]
    source = data_url(file.read_bytes(), "application/pdf")
    assert content == f'<embed src="{source}">\n{QUESTION}'
    bring_in(page, turn(content))
    with page.expect_popup():
        page.locator("article.user").get_by_role("button", name="Open PDF 1").click()


def test_a_picture_that_is_removed_is_deleted_from_the_server(page: Page, app_url: str, red: Path) -> None:
    before = file_ids(app_url)
    pick(page, red)
    expect(page.locator("#attached progress:visible")).to_have_count(0)
    page.wait_for_function("document.querySelectorAll('#attached img').length === 1")
    while len(file_ids(app_url)) == len(before):
        page.wait_for_timeout(20)
    page.get_by_role("button", name="Remove picture 1").click()
    while len(file_ids(app_url)) > len(before):
        page.wait_for_timeout(20)


def test_what_the_server_has_lost_is_uploaded_again(page: Page, app_url: str, red: Path) -> None:
    pick(page, red)
    assert ask(page, QUESTION) == "red"
    for file_id in file_ids(app_url):
        httpx.delete(f"{app_url}/v1/files/{file_id}")
    ask(page, "How many shapes are there?")
    expect(page.locator(".problem")).to_have_count(0)
    assert len(file_ids(app_url)) == 1


@pytest.mark.parametrize(
    "refuse", [lambda route: route.fulfill(status=507, json={"error": {}}), lambda route: route.abort()]
)
def test_a_server_that_keeps_no_files_gets_the_pictures_themselves(
    page: Page, red: Path, refuse: Callable[[Route], None]
) -> None:
    page.route("**/v1/files", refuse)
    bodies = sent_bodies(page, as_sent=True)
    pick(page, red)
    assert ask(page, QUESTION) == "red"
    assert urls_of(bodies[0]) == [picture_url(red)]


def test_a_file_over_the_limit_is_refused_when_it_is_added(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "large.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(21 * 2**20))
    pick(page, file)
    expect(page.get_by_role("alert")).to_contain_text("“large.png” cannot be added: the media item has 22020104")
    expect(page.locator("#attached li")).to_have_count(0)
