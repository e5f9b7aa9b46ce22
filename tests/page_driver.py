"""The web page as its reader uses it, in a real Chromium: files brought in, questions asked, answers seen."""

import base64
import json
import re
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
from playwright.sync_api import (
    BrowserContext,
    ConsoleMessage,
    FilePayload,
    Locator,
    Page,
    Request,
    Route,
    ViewportSize,
    expect,
)

from raylens.preprocess.data_url import data_url

CHAT = "**/v1/chat/completions"
QUESTION = "What colour is the circle?"
PHONE: ViewportSize = {"width": 360, "height": 640}

_COPY = """async (base64) => {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  await navigator.clipboard.write([new ClipboardItem({ "image/png": new Blob([bytes], { type: "image/png" }) })]);
}"""


_UPLOAD = re.compile("upload:(file-[0-9a-f]+)")


class Watch:
    """What must not happen on the page: requests to other origins, and complaints of its policy or of its script."""

    def __init__(self, page: Page, url: str) -> None:
        self.complaints: list[str] = []
        self._url = url
        page.on("request", self._on_request)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((f"{self._url}/", "data:", f"blob:{self._url}/")):
            self.complaints.append(f"request to {request.url[:100]}")

    def _on_console(self, message: ConsoleMessage) -> None:
        # Chromium notes every status above 399 itself.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.complaints.append(f"{message.type}: {message.text}")


# What the reader does


def open_page(context: BrowserContext, url: str, model: str = "shapes") -> Page:
    """A tab that shows the page of a server that is ready."""
    page = context.new_page()
    # Playwright takes choosers over from its first listener on, which is too late for one that a key press opens.
    page.on("filechooser", lambda chooser: None)
    page.goto(url)
    expect(page.locator("#health")).to_have_text("Ready")
    expect(page.locator("#model")).to_have_text(model)
    return page


def pick(page: Page, *files: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add pictures").click()
    chooser.value.set_files(files)


def paste(page: Page, file: Path) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate(_COPY, base64.b64encode(file.read_bytes()).decode())
    page.press("#question", "Control+V")


def drop(page: Page, *files: Path) -> None:
    """As when files are dragged in from the desktop."""
    devtools = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        devtools.send("Input.dispatchDragEvent", {"type": kind, "x": 200, "y": 200, "data": data})
        expect(page.locator("#drop")).to_be_visible(visible=kind != "drop")


def reload(page: Page) -> None:
    """Once the browser has kept what the page gave it: a reload may end what is still written. Returns once the page
    has restored it, because clicks before have no effect."""
    # It comes after whatever was to be kept before it.
    page.evaluate("import('/page/chat/storage.js').then(({ keep }) => keep(() => {}))")
    page.reload()
    expect(page.locator("#health")).not_to_have_text("Connecting")


def send(page: Page, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def ask(page: Page, text: str) -> str:
    """The whole answer."""
    number = page.locator(".measures").count()
    send(page, text)
    expect(page.locator(".measures")).to_have_count(number + 1)
    return page.locator("article.assistant .content").last.inner_text()


def open_list(page: Page) -> Locator:
    """The list of conversations."""
    page.get_by_role("button", name="Conversations", exact=True).click()
    expect(page.locator("#conversations")).to_be_visible()
    return page.locator("#conversation-list")


def switch(page: Page, title: str) -> None:
    """To the conversation of that title."""
    open_list(page).locator(".open", has_text=title).click()
    expect(page.locator("#conversations")).to_be_hidden()


def history(page: Page) -> dict[str, Any]:
    """The conversation as it is exported."""
    open_list(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export the conversation").click()
    exported: dict[str, Any] = json.loads(download.value.path().read_text())
    return exported


def bring_in(page: Page, content: object) -> None:
    """Imports a file, or one that holds `content`."""
    text = content if isinstance(content, str) else json.dumps(content, default=str)
    open_list(page)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import a conversation").click()
    made: FilePayload = {"name": "history.json", "mimeType": "application/json", "buffer": text.encode()}
    chooser.value.set_files(content if isinstance(content, Path) else made)


# What goes to the server and what comes from it


def sent_bodies(page: Page, *, as_sent: bool = False) -> list[Any]:
    """Fills with the requests for answers from now on. Uploaded files are in them as data: URLs, unless `as_sent`."""
    bodies: list[Any] = []

    def note(request: Request) -> None:
        if fnmatch(request.url, CHAT):
            body = request.post_data or ""
            bodies.append(json.loads(body if as_sent else _UPLOAD.sub(partial(_content, request.url), body)))

    page.on("request", note)
    return bodies


def _content(url: str, match: re.Match[str]) -> str:
    """The data: URL of an upload on the server of that URL."""
    file = f"{urljoin(url, '/v1/files')}/{match[1]}"
    name, content = httpx.get(file).json()["filename"], httpx.get(f"{file}/content").content
    return data_url(content, name.replace(".", "/"))


# 20 kB/s are about 80 tokens a second, each of which has an event of its own.
_OVER_A_SLOW_NETWORK = """() => {
  const fetchAtOnce = window.fetch;
  window.fetch = async (url, options) => {
    const response = await fetchAtOnce(url, options);
    if (!String(url).includes("/chat/completions")) return response;
    const reader = response.body.getReader();
    let rest = new Uint8Array();
    const pull = async (controller) => {
      if (!rest.length) {
        const { done, value } = await reader.read();
        if (done) return controller.close();
        rest = value;
      }
      await new Promise((resolve) => setTimeout(resolve, 50));
      controller.enqueue(rest.slice(0, 1000));
      rest = rest.slice(1000);
    };
    return new Response(new ReadableStream({ pull, cancel: (reason) => reader.cancel(reason) }), response);
  };
}"""


def make_endless(page: Page, max_tokens: int, **options: Any) -> None:
    """Answers are as long as they may be from now on. They come over a slow network until the page is loaded again,
    for the server makes two thousand tokens in a second. The browser itself may have the whole answer before the page
    does. `options` are further fields of the request: more answers to it take the server longer."""
    page.evaluate(_OVER_A_SLOW_NETWORK)

    def change(route: Route) -> None:
        body = route.request.post_data_json or {}
        body |= {"ignore_eos": True, "max_tokens": max_tokens, **options}
        route.continue_(post_data=json.dumps(body))

    page.route(CHAT, change)


def answer_with(page: Page, text: str, *, reason: str | None = "stop", pieces: int = 7) -> None:
    """Makes `text` the next answer, in events of `pieces` characters. Without a reason the stream breaks off."""
    deltas: list[Any] = [{"content": text[begin : begin + pieces]} for begin in range(0, len(text), pieces)]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    events = [json.dumps({"choices": [choice]}) for choice in choices]
    if reason is not None:
        events += [json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}), "[DONE]"]
    body = "".join(f"data: {event}\n\n" for event in events)
    page.route(CHAT, lambda route: route.fulfill(body=body, content_type="text/event-stream"), times=1)


def openai_error(status: int, message: str, **headers: str) -> dict[str, Any]:
    """What `Route.fulfill` takes to answer as a server in trouble does."""
    error = {"message": message, "type": "server_error", "param": None, "code": "in_trouble"}
    return {"status": status, "json": {"error": error}, "headers": headers}


def turn(user: str, assistant: str = "red") -> dict[str, Any]:
    """A history of one question and its answer."""
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return {"version": 1, "model": "shapes", "messages": messages}


def content_of(medium: Locator) -> str:
    """What an image or a video element shows, as a data: URL."""
    url: str = medium.evaluate(
        """async (node) => {
          const { dataUrlOf } = await import("/page/chat/media.js");
          return dataUrlOf(node.closest("[data-medium]").dataset.medium);
        }"""
    )
    return url


def picture_url(file: Path) -> str:
    return data_url(file.read_bytes())
