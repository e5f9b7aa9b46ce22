"""The web page in a real Chromium, on the real application."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from raylens.checkpoints import PICTURES
from raylens.deployments.endpoint import page_route
from raylens.preprocess.data_url import data_url
from tests.deployments.endpoint.test_page_markdown import RICH
from tests.page_driver import (
    CHAT,
    PHONE,
    QUESTION,
    answer_with,
    ask,
    bring_in,
    content_of,
    drop,
    history,
    make_endless,
    open_list,
    open_page,
    openai_error,
    paste,
    pick,
    picture_url,
    reload,
    send,
    sent_bodies,
    turn,
)
from tests.pictures import disc, encoded

pytest_plugins = ("tests.page_fixtures",)


# How it is served


def test_the_page_runs_its_own_script_and_no_other(app_url: str) -> None:
    response = httpx.get(app_url)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    directives = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert not re.search(r"<style|<script(?! )|\son\w+=", response.text)
    assert {directives.pop(f"{kind}-src") for kind in ("script", "style", "font", "connect")} == {"'self'"}
    assert directives.pop("img-src") == directives.pop("media-src") == "data: blob:"
    assert directives.pop("require-trusted-types-for") == "'script'"
    closed = ("default-src", "form-action", "frame-ancestors", "base-uri", "trusted-types")
    assert directives == dict.fromkeys(closed, "'none'")
    assert "/" not in httpx.get(f"{app_url}/openapi.json").json()["paths"]


def test_a_browser_that_has_the_page_is_told_so(app_url: str) -> None:
    etag = httpx.get(app_url).headers["etag"]
    assert httpx.get(app_url).headers["cache-control"] == "no-cache"
    for known in (etag, f'{etag}, "other"', "*"):
        again = httpx.get(app_url, headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(app_url, headers={"if-none-match": '"other"'}).status_code == 200
    assert httpx.head(app_url).headers["etag"] == etag


def test_its_files_come_with_their_types_and_small(app_url: str) -> None:
    for name, kind in (
        ("chat/main.js", "text/javascript; charset=utf-8"),
        ("shared/shared.css", "text/css; charset=utf-8"),
        ("vendor/fonts/KaTeX_Main-Regular.woff2", "font/woff2"),
    ):
        whole = httpx.get(f"{app_url}/page/{name}", headers={"accept-encoding": "identity"})
        assert whole.headers["content-type"] == kind
        assert whole.headers["x-content-type-options"] == "nosniff"
        with httpx.stream("GET", f"{app_url}/page/{name}", headers={"accept-encoding": "gzip"}) as packed:
            num_bytes = sum(map(len, packed.iter_raw()))
        assert num_bytes < 0.6 * len(whole.content) or kind == "font/woff2"
    for name in ("chat/index.html", "nothing.js", "", "../page_route.py", "vendor/LICENSES"):
        assert httpx.get(f"{app_url}/page/{name}").status_code == 404


MOST_BYTES, MOST_WITH_ALL = 150_000, 400_000


def test_the_page_is_small(context: BrowserContext, app_url: str) -> None:
    """Examples included. KaTeX, its fonts and highlight.js come with the first formula and the first code."""
    page = context.new_page()
    devtools = context.new_cdp_session(page)
    devtools.send("Network.enable")
    sizes: list[float] = []
    devtools.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto(app_url)
    expect(page.locator(".example")).to_have_count(4)
    assert 50_000 < sum(sizes) < MOST_BYTES
    answer_with(page, RICH)
    send(page, "What does it say?")
    expect(page.locator(".maths .katex").last).to_be_visible()
    expect(page.locator(".hljs-keyword").first).to_be_visible()
    assert MOST_BYTES < sum(sizes) < MOST_WITH_ALL


def test_every_module_of_the_page_is_asked_for_at_once() -> None:
    """Else a module is found only when the browser has read the one before it."""
    folder = page_route.PAGE
    named = set(re.findall(r'href="page/(\S+\.js)"', page_route.CHAT_PAGE.read_text()))
    modules = {f"chat/{file.name}" for file in (folder / "chat").glob("*.js")} - {"chat/main.js"}
    assert modules <= named
    assert all((folder / name).is_file() for name in named)


def test_no_other_route_gives_a_script(app_url: str) -> None:
    """The page's policy allows all scripts of its own origin."""
    script = ("file", ("a.js", b"window.wasRun = true", "text/javascript"))
    file_id = httpx.post(f"{app_url}/v1/files", files=[script], data={"purpose": "vision"}).json()["id"]
    kept = httpx.get(f"{app_url}/v1/files/{file_id}/content")
    assert kept.headers["content-type"] == "application/octet-stream"
    assert kept.headers["x-content-type-options"] == "nosniff"


def test_the_policy_holds(context: BrowserContext, app_url: str) -> None:
    page = open_page(context, app_url)
    for attempt, directive in (
        ("document.body.innerHTML = '<img>'", "require-trusted-types-for"),
        ("document.body.setAttribute('onclick', 'window.wasRun = true')", "require-trusted-types-for"),
        ("add('script').text = 'window.wasRun = true'", "require-trusted-types-for"),
        ("add('style').textContent = '* {}'", "style-src-elem"),
        ("add('script').src = 'http://127.0.0.2/a.js'", "require-trusted-types-for"),
        ("add('img').src = 'http://127.0.0.2/a.png'", "img-src"),
        ("add('iframe').src = '/'", "frame-src"),
        ("fetch('http://127.0.0.2/').catch(() => {})", "connect-src"),
    ):
        caught = page.evaluate(f"""() => new Promise((resolve) => {{
          const add = (tag) => document.body.appendChild(document.createElement(tag));
          document.onsecuritypolicyviolation = ({{ effectiveDirective }}) => resolve(effectiveDirective);
          setTimeout(resolve, 3000);
          try {{ {attempt} }} catch {{ /* as it should be */ }}
        }})""")
        assert caught == directive, attempt
    assert page.evaluate("window.wasRun") is None


# Pictures and answers


@pytest.mark.parametrize("bring", [drop, paste, pick])
def test_a_picture_is_asked_about(page: Page, red: Path, bring: Callable[[Page, Path], None]) -> None:
    bring(page, red)
    expect(page.locator("#attached img")).to_have_count(1)
    assert ask(page, QUESTION) == "red"
    expect(page.locator("#attached img")).to_have_count(0)
    shown = content_of(page.locator("article.user img"))
    # Chromium writes pictures on the clipboard anew; else the file is sent as it is.
    assert shown.startswith("data:image/png;base64,") if bring is paste else shown == picture_url(red)


def test_several_pictures_go_out_in_order(page: Page, red: Path, blue: Path, tmp_path: Path) -> None:
    bodies = sent_bodies(page)
    text = tmp_path / "text.png"
    text.write_text("no picture, whatever its name")
    drop(page, red, text, blue)
    expect(page.get_by_role("alert")).to_contain_text("“text.png” cannot be added: it is not a PNG")
    expect(page.locator("#attached img")).to_have_count(2)
    pick(page, red)
    page.get_by_role("button", name="Remove picture 1").click()
    assert "blue" in ask(page, "What is in the first image?")
    urls = [part["image_url"]["url"] for part in bodies[0]["messages"][0]["content"][:-1]]
    assert urls == [picture_url(blue), picture_url(red)]


def hold_upload(page: Page) -> None:
    """The next file is uploaded when `goOn()` is called."""
    page.evaluate("""() => {
      const { send } = XMLHttpRequest.prototype;
      const goingOn = new Promise((resolve) => { window.goOn = resolve; });
      XMLHttpRequest.prototype.send = function (body) {
        XMLHttpRequest.prototype.send = send;
        goingOn.then(() => send.call(this, body));
      };
    }""")


def test_a_question_waits_for_its_pictures(page: Page, red: Path, blue: Path) -> None:
    hold_upload(page)
    pick(page, red)
    pick(page, blue)
    bodies = sent_bodies(page)
    send(page, QUESTION)
    page.press("#question", "Enter")
    page.evaluate("goOn()")
    expect(page.locator(".measures")).to_have_count(1)
    expect(page.locator("article")).to_have_count(2)
    (body,) = bodies
    (message,) = body["messages"]
    urls = [part["image_url"]["url"] for part in message["content"][:-1]]
    assert urls == [picture_url(red), picture_url(blue)]


def test_a_question_is_not_sent_without_one_of_its_pictures(page: Page, red: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("no picture, whatever its name")
    hold_upload(page)
    drop(page, red, text)
    send(page, QUESTION)
    page.evaluate("goOn()")
    expect(page.get_by_role("alert")).to_contain_text("“text.png” cannot be added")
    expect(page.locator("#question")).to_have_value(QUESTION)
    expect(page.locator("article")).to_have_count(0)
    assert ask(page, QUESTION) == "red"


@pytest.mark.parametrize("file_format", ["JPEG", "WEBP", "GIF", "BMP"])
def test_every_kind_of_picture_keeps_its_type(page: Page, tmp_path: Path, file_format: str) -> None:
    file = tmp_path / "picture"
    file.write_bytes(encoded(disc("blue", (96, 96), (36, 36)), file_format))
    pick(page, file)
    assert ask(page, QUESTION) == "blue"
    content = history(page)["messages"][0]["content"]
    assert content.startswith(f'<img src="data:image/{file_format.lower()};base64,')


def test_an_answer_is_shown_as_it_comes(page: Page) -> None:
    make_endless(page, 500)
    page.evaluate("""() => {
      window.lengths = new Set();
      const shown = () => document.querySelector("article.assistant .content")?.innerText ?? "";
      const note = () => window.lengths.add(shown().length);
      new MutationObserver(note).observe(document.querySelector("#log"), {childList: true, subtree: true});
    }""")
    answer = ask(page, "Describe the picture.")
    lengths = page.evaluate("[...window.lengths]")
    assert len(lengths) > 4
    assert lengths == sorted(lengths)
    assert lengths[-1] == len(answer)


def test_who_listens_hears_the_whole_answer_once(page: Page) -> None:
    pick(page, PICTURES / "one.png")
    answer = ask(page, "Describe the picture.")
    assert answer.startswith("an orange cross in the top right, a purple circle")
    expect(page.locator("[aria-live=polite]")).to_have_text(answer)
    page.evaluate("""async () => {
      const { announcer } = await import("/page/chat/notices.js");
      const announce = announcer();
      for (const text of ["One. Tw", "One. Two, thr", "One. Two, three.\\nF"]) announce(text);
      announce("One. Two, three.\\nFour", true);
    }""")
    assert page.locator("[aria-live=polite] p").all_text_contents() == ["One.", " Two, three.\n", "Four"]


def test_the_waterfall_tells_every_stage(page: Page, red: Path) -> None:
    red.write_bytes(encoded(disc("red", (97, 95), (36, 36))))
    pick(page, red)
    ask(page, QUESTION)
    ask(page, "How many shapes are there?")
    for measures in page.locator(".measures").all():
        expect(measures.locator(".waterfall")).to_be_hidden()
        measures.locator("summary").click()
    first, second = page.locator(".measures").all()
    for text in ("ms to first token", "prompt", "completion tokens"):
        expect(first.locator("summary")).to_contain_text(text)

    def rows(measures: Any) -> dict[str, str]:
        cells = "(rows) => rows.map(({ cells }) => [cells[0].innerText, cells[2].innerText])"
        return dict(measures.locator("tr").evaluate_all(cells))

    stages = ["Media", "Processor", "Encode", "Prompt", "Hand-over", "Queue", "Prefill", "Decode", "Calls"]
    before, after = rows(first), rows(second)
    assert list(before) == list(after) == stages
    assert all(re.fullmatch(r"[\d.]+ m?s", figure) for figure in before.values()), before
    assert [name for name, figure in after.items() if "cached" in figure] == ["Processor", "Encode"]

    place = "(bars) => bars.map((bar) => [bar.offsetLeft, bar.offsetWidth, bar.parentElement.offsetWidth])"
    places = first.locator(".bar").evaluate_all(place)
    # A stage that took no time has no bar.
    assert len(places) >= sum(not re.fullmatch(r"0(\.0+)? m?s", figure) for figure in before.values())
    assert all(left >= 0 and left + width <= track + 3 for left, width, track in places)
    covered = {pixel for left, width, _ in places for pixel in range(left, left + width + 1)}
    assert len(covered) >= places[0][2], "no time is without a name"


def test_an_answer_is_stopped_in_the_middle(page: Page) -> None:
    make_endless(page, 1900)
    send(page, "Hello")
    expect(page.locator("article.assistant .content")).to_have_text(re.compile(".{20}"))
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("article.assistant .note")).to_have_text("Stopped")
    page.unroute(CHAT)
    partial = history(page)["messages"][1]["content"]
    assert len(partial) > 20
    bodies = sent_bodies(page)
    ask(page, "Who are you?")
    assert bodies[0]["messages"][1] == {"role": "assistant", "content": partial}


def test_what_has_come_outlives_the_page(page: Page) -> None:
    make_endless(page, 1900)
    send(page, "Hello")
    expect(page.locator("article.assistant .content")).to_have_text(re.compile(".{20}"))
    page.wait_for_timeout(2_500)  # it is kept once a second
    reload(page)
    expect(page.locator("article.assistant .note")).to_have_text("Interrupted")
    assert len(history(page)["messages"][1]["content"]) > 20


def test_a_conversation_is_left_in_the_middle_of_an_answer(page: Page) -> None:
    make_endless(page, 1900)
    send(page, "Hello")
    expect(page.locator("article.assistant .content")).to_have_text(re.compile(".{20}"))
    bring_in(page, turn("Another question"))
    expect(page.locator("article.user")).to_have_text(re.compile("Another question"))
    page.unroute(CHAT)
    ask(page, "Who are you?")
    assert len(history(page)["messages"]) == 4
    expect(page.locator("article")).to_have_count(4)


def test_a_question_that_is_stopped_before_its_answer_comes_back(page: Page) -> None:
    page.route(CHAT, lambda route: None)
    send(page, "Hello")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.press("#question", "Escape")
    expect(page.locator("#question")).to_have_value("Hello")
    expect(page.locator("article")).to_have_count(0)


def test_a_conversation_goes_on_with_its_pictures(page: Page, red: Path) -> None:
    bodies = sent_bodies(page)
    pick(page, red)
    assert ask(page, QUESTION) == "red"
    assert ask(page, "How many shapes are there?") == "one"
    picture = {"type": "image_url", "image_url": {"url": picture_url(red)}}
    assert bodies[1]["messages"] == [
        {"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "How many shapes are there?"},
    ]
    assert bodies[1].keys() == {"model", "messages", "stream", "stage_timings", "stream_options"}


def test_another_answer_takes_the_place_of_the_last(page: Page, red: Path) -> None:
    pick(page, red)
    ask(page, QUESTION)
    page.route(CHAT, lambda route: route.fulfill(**openai_error(500, "broken")))
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert")).to_contain_text("broken")
    assert [message["content"] for message in history(page)["messages"]][1:] == ["red"]
    page.unroute(CHAT)
    bodies = sent_bodies(page)
    with page.expect_request(CHAT):
        page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".measures")).to_have_count(1)
    assert len(bodies[0]["messages"]) == 1
    assert [message["content"] for message in history(page)["messages"]][1:] == ["red"]


def test_settings_are_sent_where_they_are_set_and_kept(page: Page, red: Path) -> None:
    page.get_by_role("button", name="Settings").click()
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 2, "seed": 7}
    for name, value in given.items():
        page.fill(f"#{name}", str(value))
    page.fill("#stop_strings", "never\\nthis\nnor this")
    page.fill("#system", "Be brief.")
    reload(page)
    bodies = sent_bodies(page)
    pick(page, red)
    ask(page, "Describe the picture.")
    expect(page.locator("article.assistant .note")).to_contain_text("limit of tokens")
    assert bodies[0].items() >= given.items()
    assert bodies[0]["stop"] == ["never\nthis", "nor this"]
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset").click()
    page.keyboard.press("Escape")
    ask(page, QUESTION)
    assert not bodies[1].keys() & {*given, "stop"}
    assert bodies[1]["messages"][0]["role"] == "user"


# The history


def test_the_history_is_exported_and_imported(page: Page, red: Path, browser: Browser, app_url: str) -> None:
    pick(page, red)
    ask(page, QUESTION)
    exported = history(page)
    assert exported == turn(f'<img src="{picture_url(red)}">\n{QUESTION}')
    reload(page)
    expect(page.locator(".measures")).to_have_count(1)
    assert history(page) == exported
    other = browser.new_context()
    fresh = open_page(other, app_url)
    bring_in(fresh, exported)
    assert content_of(fresh.locator("article.user img")) == picture_url(red)
    assert history(fresh) == exported
    assert ask(fresh, "How many shapes are there?") == "one"
    other.close()


def test_texts_and_pictures_of_a_history_alternate(page: Page, red: Path, blue: Path) -> None:
    first, second = picture_url(red), picture_url(blue)
    bring_in(page, turn(f'Before\n<img src="{first}">\n\nbetween<img src="{second}">after <img src="x">', "yes"))
    expect(page.locator("article")).to_have_count(2)
    bodies = sent_bodies(page)
    ask(page, "And now?")
    assert bodies[0]["messages"][0]["content"] == [
        {"type": "text", "text": "Before"},
        {"type": "image_url", "image_url": {"url": first}},
        {"type": "text", "text": "\nbetween"},
        {"type": "image_url", "image_url": {"url": second}},
        {"type": "text", "text": 'after <img src="x">'},
    ]


def test_a_picture_of_many_megabytes_is_one(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    source = data_url(os.urandom(18_000_000))
    file.write_text(json.dumps(turn(f'<img src="{source}">\nWhat is this?')))
    bring_in(page, file)
    expect(page.locator("article.user img")).to_have_count(1)
    assert page.locator("article.user .content").inner_text() == "What is this?"


def test_a_bad_file_is_refused_and_nothing_is_lost(page: Page) -> None:
    bring_in(page, turn("What was here"))
    expect(page.locator("article")).to_have_count(2)
    page.fill("#question", "A draft")
    for content, complaint in (
        ("{", "it is no JSON"),
        ([], "no JSON object"),
        ({"version": 2, "messages": []}, "version is 2"),
        ({"version": 1}, "messages is nothing, not a list"),
        ({"version": 1, "messages": []}, "messages is empty"),
        ({"version": 1, "messages": [7]}, "messages[0] is 7"),
        ({"version": 1, "messages": [{"role": "wizard", "content": "Hi"}]}, 'messages[0].role is "wizard"'),
        ({"version": 1, "messages": [{"role": "user", "content": ["Hi"]}]}, 'messages[0].content is ["Hi"]'),
    ):
        bring_in(page, content)
        expect(page.locator(".notice")).to_contain_text(complaint)
        page.get_by_role("button", name="Close").click()
    assert history(page) == turn("What was here")
    expect(page.locator("#question")).to_have_value("A draft")


def test_markup_in_a_conversation_is_text(page: Page) -> None:
    attack = "<img src=x onerror='window.wasRun = 1'><script>window.wasRun = 2</script>[a](javascript:alert(1))"
    svg = '<img src="data:image/svg+xml;base64,PHN2Zy8+">'
    fenced = f"```html\n{attack}\n```"
    bring_in(page, turn(f"{attack}{svg}", f"{attack}\n\n{fenced}\n\n`{attack}` **{attack}** {svg}"))
    expect(page.locator("article")).to_have_count(2)
    assert page.locator("#log").locator("img, script, a, iframe").count() == 0
    assert attack in page.locator("article.user .content").inner_text()
    assert page.locator("article.assistant pre").inner_text() == attack
    assert page.evaluate("window.wasRun") is None


# A server in trouble


def test_a_busy_server_is_asked_again_when_it_said(page: Page) -> None:
    page.route(CHAT, lambda route: route.fulfill(**openai_error(429, "all is taken", **{"retry-after": "2"})), times=1)
    send(page, "Who are you?")
    expect(page.locator(".problem.busy")).to_contain_text("The server is busy")
    expect(page.locator(".problem.busy")).to_contain_text("all is taken")
    expect(page.locator(".problem.busy")).to_contain_text("again in 1 second.")
    expect(page.locator(".measures")).to_have_count(1)
    expect(page.locator(".problem")).to_have_count(0)


def test_a_server_that_stays_busy_is_asked_again_by_the_reader(page: Page) -> None:
    trouble = openai_error(503, "still starting", **{"retry-after": "100"})
    page.route(CHAT, lambda route: route.fulfill(**trouble), times=2)
    send(page, "Who are you?")
    page.get_by_role("button", name="Retry now").click()
    expect(page.locator("article.failed .problem")).to_contain_text("still starting")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".measures")).to_have_count(1)
    expect(page.locator("#question")).to_have_value("")


def test_the_page_finds_a_server_that_was_gone(page: Page) -> None:
    page.context.set_offline(True)
    send(page, "Who are you?")
    expect(page.locator(".problem")).to_contain_text("The server cannot be reached")
    expect(page.locator("#health")).to_have_text("Unreachable", timeout=5_000)  # looked at once, not in its turn
    page.context.set_offline(False)
    expect(page.locator("#health")).to_have_text("Ready")
    expect(page.locator(".problem")).to_contain_text("The server is back")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".measures")).to_have_count(1)


@pytest.mark.parametrize(
    ("end", "note"),
    [("", "The connection was lost"), ('data: {"error": {"message": "the stage failed"}}\n\n', "the stage failed")],
)
def test_what_came_before_a_stream_broke_stays(page: Page, end: str, note: str) -> None:
    piece = 'data: {"choices": [{"delta": {"content": "half an"}}]}\n\n'
    stream = {"content_type": "text/event-stream", "body": piece + end}
    page.route(CHAT, lambda route: route.fulfill(**stream), times=1)
    send(page, "Who are you?")
    expect(page.locator("article.assistant .problem")).to_contain_text(note)
    assert history(page)["messages"][1]["content"] == "half an"


def test_who_is_not_signed_in_is_told_so(page: Page) -> None:
    page.route(CHAT, lambda route: route.fulfill(**openai_error(401, "this API key is not known")))
    send(page, "Who are you?")
    expect(page.locator(".problem")).to_contain_text("You are not signed in")
    expect(page.locator(".problem")).to_contain_text("this API key is not known")


def test_the_state_of_every_stage_is_shown(page: Page) -> None:
    page.locator("#status summary").click()
    assert page.locator("#stages").inner_text().split() == [
        "Preprocess",
        "Ready",
        "Encode",
        "Ready",
        "Generate",
        "Ready",
        "Shared",
        "Ready",
    ]
    stages = {"preprocess": "ready", "encode": "unresponsive", "generate": "starting"}
    page.route("**/health", lambda route: route.fulfill(status=503, json={"ready": False, "stages": stages}))
    reload(page)
    expect(page.locator("#health")).to_have_text("Not ready")


# Who reads it, and where


def test_the_keyboard_alone_will_do(page: Page, red: Path) -> None:
    keys = page.keyboard
    expect(page.locator("#question")).to_be_focused()
    keys.press("Tab")
    expect(page.get_by_role("button", name="Add pictures")).to_be_focused()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "2px"
    with page.expect_file_chooser() as chooser:
        keys.press("Enter")
    chooser.value.set_files(red)
    expect(page.locator("#attached img")).to_have_count(1)
    expect(page.locator("#question")).to_be_focused()
    keys.type("What colour")
    keys.press("Shift+Enter")
    keys.type("is the circle?")
    expect(page.locator("#question")).to_have_value("What colour\nis the circle?")
    keys.press("Enter")
    expect(page.locator(".measures")).to_have_count(1)
    expect(page.locator("#question")).to_be_focused()
    keys.press("Shift+Tab")
    expect(page.get_by_role("button", name="Regenerate")).to_be_focused()
    keys.press("Shift+Tab")
    expect(page.get_by_role("button", name="Copy the answer")).to_be_focused()
    keys.press("Shift+Tab")
    expect(page.locator(".measures summary")).to_be_focused()
    expect(page.locator(".waterfall")).to_be_hidden()
    keys.press("Enter")
    expect(page.locator(".waterfall")).to_be_visible()
    keys.press("Shift+Tab")
    expect(page.get_by_role("button", name="Edit the question")).to_be_focused()
    keys.press("Shift+Tab")
    keys.press("Enter")
    expect(page.locator("#viewer")).to_be_visible()
    keys.press("Escape")
    expect(page.get_by_role("button", name="Enlarge picture 1")).to_be_focused()


def test_every_control_has_a_name(page: Page, red: Path) -> None:
    bring_in(page, turn("Hello", "```\ncode\n```"))
    pick(page, red)
    expect(page.locator("#attached img")).to_have_count(1)
    expect(page.locator("article.assistant pre")).to_have_count(1)
    open_list(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").click()
    controls = page.locator("button, input:not([type=file]), textarea, img:not(.example img), summary").all()
    assert len(controls) > 35
    name = "(node) => node.ariaLabel || node.alt || node.labels?.[0]?.textContent || node.textContent"
    assert [one for one in controls if not one.evaluate(name)] == []


def test_a_phone_shows_all_of_it(browser: Browser, app_url: str, red: Path) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    page = open_page(context, app_url)
    pick(page, red, red, red)
    ask(page, "What is in the second image?" + " and so on" * 20)
    page.set_input_files("#media-files", [red, Path(__file__)])
    expect(page.locator("#attached img")).to_have_count(1)
    expect(page.locator(".notice")).to_have_count(1)
    assert page.evaluate("document.querySelector('#model').scrollWidth <= document.querySelector('#model').clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for one in page.locator("header button, footer button:visible, #question, #status summary").all():
        box = one.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 640
        assert min(box["width"], box["height"]) >= 24
    context.close()


def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser, app_url: str) -> None:
    context = browser.new_context(color_scheme="dark")
    page = open_page(context, app_url)

    def brightness() -> int:
        colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3])

    assert brightness() < 100
    page.get_by_role("button", name="Dark theme", pressed=True).click()
    assert brightness() > 600
    reload(page)
    assert brightness() > 600
    expect(page.get_by_role("button", name="Dark theme")).to_have_attribute("aria-pressed", "false")
    context.close()
