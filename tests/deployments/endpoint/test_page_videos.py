"""Videos on the web page: where the model takes them, and where it does not."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from playwright.sync_api import BrowserContext, Page, expect

from raylens.preprocess.data_url import data_url
from tests.page_driver import bring_in, content_of, drop, history, open_page, pick, send, sent_bodies
from tests.pictures import disc

pytest_plugins = ("tests.page_fixtures",)

QUESTION = "What moves?"


def encoded_video(file_format: str, encoder: str) -> bytes:
    """Half a second of a red disc."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=file_format) as container:
        stream: VideoStream = container.add_stream(encoder, rate=10)  # type: ignore[assignment]
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for number in range(5):
            picture = np.asarray(disc("red", (64, 64), (8 + 4 * number, 8)))
            frame = VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


@pytest.fixture(scope="module")
def webm() -> bytes:
    return encoded_video("webm", "libvpx")


@pytest.fixture
def clip(webm: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "clip.webm"
    path.write_bytes(webm)
    return path


def model_card(**fields: object) -> dict[str, Any]:
    """What `Route.fulfill` takes to tell of the model."""
    return {"json": {"object": "list", "data": [{"id": "shapes", "object": "model", **fields}]}}


@pytest.fixture
def video_page(context: BrowserContext, page: Page, app_url: str) -> Page:
    """The page of a server whose model takes videos, as far as it says."""
    card = model_card(modalities=["image", "video"])
    context.route("**/v1/models", lambda route: route.fulfill(**card))
    return open_page(context, app_url)


def paste_file(page: Page, file: Path) -> None:
    page.evaluate(
        """([base64, name]) => {
          const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
          const clipboardData = new DataTransfer();
          clipboardData.items.add(new File([bytes], name));
          document.activeElement.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true }));
        }""",
        [base64.b64encode(file.read_bytes()).decode(), file.name],
    )


@pytest.mark.parametrize("bring", [pick, drop, paste_file])
def test_a_video_is_sent_as_one(video_page: Page, clip: Path, red: Path, bring: Callable[[Page, Path], None]) -> None:
    page = video_page
    bring(page, clip)
    preview = page.locator("#attached video")
    expect(preview).to_have_count(1)
    page.wait_for_function("() => document.querySelector('#attached video').videoWidth === 64")
    pick(page, red)
    expect(page.locator("#attached img")).to_have_count(1)
    page.get_by_role("button", name="Play video 1").click()
    expect(page.locator("#viewed video[controls]")).to_be_visible()
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#viewed video")).to_have_count(0)
    bodies = sent_bodies(page)
    send(page, QUESTION)
    url = data_url(clip.read_bytes(), "video/webm")
    # The bundled model takes no videos, whatever the page has been told.
    problem = page.locator("article.failed .problem")
    expect(problem).to_contain_text("The server refused the question")
    expect(problem).to_contain_text("video")
    expect(problem).to_contain_text("400 · invalid_request_error")
    content = bodies[0]["messages"][0]["content"]
    assert content[0] == {"type": "video_url", "video_url": {"url": url}}
    assert [part["type"] for part in content] == ["video_url", "image_url", "text"]
    assert content_of(page.locator("article.failed video")) == url


def test_the_history_holds_videos(video_page: Page, clip: Path) -> None:
    page = video_page
    content = f'<video src="{data_url(clip.read_bytes(), "video/webm")}"></video>\n{QUESTION}'
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a disc"}]
    exported = {"version": 1, "model": "shapes", "messages": messages}
    bring_in(page, exported)
    expect(page.locator("article.user video")).to_have_count(1)
    expect(page.locator("article.user .content")).to_have_text(QUESTION)
    assert history(page) == exported
    page.get_by_role("button", name="Edit the question").click()
    page.get_by_role("button", name="Remove video 1").click()
    expect(page.locator("#attached video")).to_have_count(0)


@pytest.mark.parametrize(
    ("content", "subtype"),
    [
        (encoded_video("mp4", "mpeg4"), "mp4"),
        (encoded_video("mov", "mpeg4"), "quicktime"),
        (encoded_video("matroska", "libvpx"), "webm"),
    ],
    ids=["mp4", "mov", "matroska"],
)
def test_every_kind_of_video_gets_its_type(video_page: Page, tmp_path: Path, content: bytes, subtype: str) -> None:
    file = tmp_path / "clip"
    file.write_bytes(content)
    pick(video_page, file)
    assert content_of(video_page.locator("#attached video")) == data_url(content, f"video/{subtype}")


def test_a_model_for_pictures_gets_no_video(page: Page, clip: Path, red: Path) -> None:
    drop(page, clip, red)
    expect(page.get_by_role("alert")).to_contain_text(
        "“clip.webm” cannot be added: it is a video, and the model here takes only pictures and PDFs."
    )
    expect(page.locator("#attached li")).to_have_count(1)
    expect(page.get_by_role("button", name="Add pictures and PDFs")).to_be_visible()
    assert "video" not in (page.get_attribute("#media-files", "accept") or "")


def test_a_server_that_names_no_modalities_takes_pictures(
    context: BrowserContext, page: Page, app_url: str, clip: Path
) -> None:
    context.route("**/v1/models", lambda route: route.fulfill(**model_card()))
    page = open_page(context, app_url)
    drop(page, clip)
    expect(page.get_by_role("alert")).to_contain_text("the model here takes only pictures and PDFs")


def test_a_server_that_is_starting_is_asked_again(
    context: BrowserContext, page: Page, app_url: str, clip: Path
) -> None:
    cards = [model_card(modalities=["image", "video"]), model_card(modalities=None)]
    context.route("**/v1/models", lambda route: route.fulfill(**(cards.pop() if len(cards) > 1 else cards[0])))
    page = open_page(context, app_url)
    expect(page.get_by_role("button", name="Add pictures and PDFs")).to_be_visible()
    drop(page, clip)
    expect(page.locator("#attached video")).to_have_count(1)
    expect(page.get_by_role("button", name="Add pictures, PDFs and videos")).to_be_visible()


def test_what_can_be_added_is_named(video_page: Page, tmp_path: Path) -> None:
    page = video_page
    expect(page.get_by_role("button", name="Add pictures, PDFs and videos")).to_be_visible()
    assert "video/mp4" in (page.get_attribute("#media-files", "accept") or "")
    expect(page.locator("#welcome")).to_contain_text("Drop pictures, PDFs and videos anywhere")
    heic = tmp_path / "picture.heic"
    heic.write_bytes(b"\0\0\0\x18ftypheic" + bytes(12))
    drop(page, heic)
    expect(page.get_by_role("alert")).to_contain_text(
        "it is not a PNG, JPEG, WebP, GIF or BMP picture, nor a PDF, nor an MP4, MOV or WebM video"
    )
