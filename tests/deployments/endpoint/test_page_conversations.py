"""Several conversations on the web page: listed, switched between, renamed, deleted, and kept by the browser."""

import re
from pathlib import Path

from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.page_driver import (
    CHAT,
    QUESTION,
    ask,
    bring_in,
    content_of,
    history,
    make_endless,
    open_list,
    open_page,
    openai_error,
    pick,
    picture_url,
    reload,
    send,
    sent_bodies,
    switch,
    turn,
)

pytest_plugins = ("tests.page_fixtures",)

OTHER = "Who are you?"


def start_new(page: Page) -> None:
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#welcome")).to_be_visible()


def titles(page: Page) -> list[str]:
    """Of the list, which is open."""
    return page.locator("#conversation-list .open span").all_inner_texts()


def test_conversations_are_listed_and_switched_between(page: Page, red: Path) -> None:
    pick(page, red)
    ask(page, QUESTION)
    start_new(page)
    ask(page, OTHER)
    rows = open_list(page)
    assert titles(page) == [OTHER, QUESTION]
    expect(rows.locator("[aria-current=true] span")).to_have_text(OTHER)
    page.keyboard.press("Escape")
    switch(page, QUESTION)
    expect(page.locator("article")).to_have_count(2)
    assert content_of(page.locator("article.user img")) == picture_url(red)
    bodies = sent_bodies(page)
    assert ask(page, "How many shapes are there?") == "one"
    assert [message["content"] for message in bodies[0]["messages"][1:]] == ["red", "How many shapes are there?"]
    reload(page)
    expect(page.locator("article")).to_have_count(4)
    open_list(page)
    assert titles(page) == [QUESTION, OTHER]


def test_a_new_conversation_leaves_the_others_as_they_are(page: Page) -> None:
    bring_in(page, turn("One"))
    expect(page.locator("article")).to_have_count(2)
    start_new(page)
    page.get_by_role("button", name="New conversation").click()
    reload(page)
    expect(page.locator("#welcome")).to_be_visible()
    bring_in(page, turn("Two"))
    expect(page.locator("article.user")).to_contain_text("Two")
    open_list(page)
    assert sorted(titles(page)) == ["One", "Two"]


def test_a_conversation_is_renamed(page: Page) -> None:
    bring_in(page, turn("Hello\nsecond line"))
    expect(page.locator("article")).to_have_count(2)
    open_list(page)
    page.get_by_role("button", name="Rename “Hello”").click()
    field = page.get_by_label("Title of the conversation")
    expect(field).to_be_focused()
    field.fill("Never")
    field.press("Escape")
    assert titles(page) == ["Hello"]
    expect(page.get_by_role("button", name="Rename “Hello”")).to_be_focused()
    page.keyboard.press("Enter")
    field.fill("Shapes")
    field.press("Enter")
    page.keyboard.press("Escape")
    ask(page, OTHER)
    reload(page)
    open_list(page)
    assert titles(page) == ["Shapes"]


def test_a_deleted_conversation_can_be_brought_back(page: Page, red: Path) -> None:
    bring_in(page, turn(f'<img src="{picture_url(red)}">\nOne'))
    bring_in(page, turn("Two"))
    expect(page.locator("article.user")).to_contain_text("Two")
    open_list(page)
    for title in ("One", "Two"):
        page.get_by_role("button", name=f"Delete “{title}”").click()
        expect(page.get_by_role("button", name=f"Undo: “{title}” is deleted")).to_be_focused()
    page.get_by_role("button", name="Undo: “One” is deleted").click()
    expect(page.locator("#conversation-list .open")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#welcome")).to_be_visible()
    switch(page, "One")
    assert content_of(page.locator("article.user img")) == picture_url(red)
    reload(page)
    expect(page.locator("article")).to_have_count(2)
    open_list(page)
    assert titles(page) == ["One"]
    page.get_by_role("button", name="Delete “One”").click()
    reload(page)
    expect(page.locator("#welcome")).to_be_visible()
    open_list(page)
    expect(page.locator("#no-conversations")).to_be_visible()


def test_an_answer_goes_where_it_was_asked_for(page: Page) -> None:
    make_endless(page, 1900)
    send(page, "Hello")
    expect(page.locator("article.assistant .content")).to_have_text(re.compile(".{20}"))
    page.unroute(CHAT)
    start_new(page)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    ask(page, OTHER)
    expect(page.locator("article")).to_have_count(2)
    expect(open_list(page)).to_contain_text("Answer on its way")
    page.keyboard.press("Escape")
    switch(page, "Hello")
    length = len(page.locator("article.assistant .content").inner_text())
    expect(page.locator("article.assistant .content")).to_have_text(re.compile(f".{{{length + 20}}}"))
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("article.assistant .note")).to_have_text("Stopped")
    expect(page.locator("article")).to_have_count(2)
    switch(page, OTHER)
    assert [message["role"] for message in history(page)["messages"]] == ["user", "assistant"]
    expect(page.locator("article.user")).to_contain_text(OTHER)
    expect(page.locator(".note")).to_have_count(0)


def test_an_answer_that_ends_out_of_sight_is_kept(page: Page) -> None:
    make_endless(page, 150)
    send(page, "Hello")
    expect(page.locator("article.assistant .content")).to_have_text(re.compile(".{20}"))
    start_new(page)
    page.fill("#question", "A draft")
    expect(page.locator("article")).to_have_count(0)
    page.wait_for_function("""async () => {
      const { state } = await import("/page/chat/state.js");
      return state.conversations[0].isKept && !state.conversations[0].messages;
    }""")
    expect(page.locator("#question")).to_have_value("A draft")
    switch(page, "Hello")
    expect(page.locator(".measures")).to_have_count(1)
    reload(page)
    expect(page.locator(".measures")).to_have_count(1)
    assert len(history(page)["messages"]) == 2


def test_a_question_that_fails_out_of_sight_says_so(page: Page) -> None:
    held: list[Route] = []
    page.route(CHAT, lambda route: held.append(route))
    with page.expect_request(CHAT):
        send(page, "Hello")
    start_new(page)
    held[0].fulfill(**openai_error(500, "broken"))
    expect(page.get_by_role("alert")).to_contain_text("“Hello” got no answer: The server failed.")
    expect(page.locator("article")).to_have_count(0)
    switch(page, "Hello")
    expect(page.locator("article")).to_have_count(1)
    expect(page.locator("article.failed .problem")).to_contain_text("broken")


def test_a_deleted_conversation_gets_no_answer(page: Page) -> None:
    make_endless(page, 1900, n=16)  # the request itself has to go on
    send(page, "Hello")
    expect(page.locator("article.assistant .content")).to_have_text(re.compile(".{20}"))
    open_list(page)
    with page.expect_event("requestfailed"):
        page.get_by_role("button", name="Delete “Hello”").click()
    reload(page)
    expect(page.locator("#welcome")).to_be_visible()
    open_list(page)
    assert titles(page) == []


def test_a_draft_stays_with_its_conversation(page: Page, red: Path) -> None:
    bring_in(page, turn("One"))
    expect(page.locator("article")).to_have_count(2)
    page.fill("#question", "A draft")
    pick(page, red)
    expect(page.locator("#attached img")).to_have_count(1)
    start_new(page)
    expect(page.locator("#question")).to_have_value("")
    expect(page.locator("#attached img")).to_have_count(0)
    page.fill("#question", "Another one")
    switch(page, "One")
    expect(page.locator("#question")).to_have_value("A draft")
    reload(page)
    expect(page.locator("#question")).to_have_value("A draft")
    expect(page.locator("#attached img")).to_have_count(1)
    start_new(page)
    expect(page.locator("#question")).to_have_value("Another one")


def test_another_tab_is_seen(page: Page, context: BrowserContext, app_url: str) -> None:
    other = open_page(context, app_url)
    bring_in(other, turn("From the other tab"))
    expect(other.locator("article")).to_have_count(2)
    page.bring_to_front()
    switch(page, "From the other tab")
    expect(page.locator("article")).to_have_count(2)
    other.bring_to_front()
    open_list(other)
    other.get_by_role("button", name="Delete “From the other tab”").click()
    page.bring_to_front()
    start_new(page)
    open_list(page)
    expect(page.locator("#no-conversations")).to_be_visible()


FORBIDDEN = """
const forbid = () => { throw new DOMException("storage is switched off", "SecurityError"); };
IDBFactory.prototype.open = forbid;
Object.defineProperty(window, "localStorage", { get: forbid });
"""


def test_a_browser_that_keeps_nothing_says_so_once(context: BrowserContext, page: Page, app_url: str) -> None:
    context.add_init_script(FORBIDDEN)
    page = open_page(context, app_url)
    expect(page.locator(".notice")).to_have_count(1)
    expect(page.locator(".notice")).to_contain_text("does not keep what is new here (storage is switched off)")
    ask(page, OTHER)
    start_new(page)
    bring_in(page, turn("Two"))
    switch(page, OTHER)
    expect(page.locator(".measures")).to_have_count(1)
    assert len(history(page)["messages"]) == 2
    page.get_by_role("button", name="Dark theme").click()
    expect(page.locator(".notice")).to_have_count(1)
    page.get_by_role("button", name="Close").click()
    ask(page, OTHER)
    expect(page.locator(".notice")).to_have_count(0)


def test_a_browser_without_room_says_so(context: BrowserContext, app_url: str, red: Path) -> None:
    devtools = context.new_cdp_session(context.new_page())
    devtools.send("Storage.overrideQuotaForOrigin", {"origin": app_url, "quotaSize": 1})
    page = open_page(context, app_url)
    pick(page, red)
    assert ask(page, QUESTION) == "red"
    expect(page.locator(".notice")).to_contain_text("does not keep what is new here (there is no more room)")
    start_new(page)
    switch(page, QUESTION)
    expect(page.locator(".measures")).to_have_count(1)
    devtools.send("Storage.overrideQuotaForOrigin", {"origin": app_url})
    ask(page, "How many shapes are there?")
    reload(page)
    expect(page.locator(".measures")).to_have_count(2)
