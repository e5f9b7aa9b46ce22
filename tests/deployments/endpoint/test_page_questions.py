"""Questions on the web page that are changed and sent again, or that find no answer."""

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.page_driver import (
    CHAT,
    QUESTION,
    ask,
    bring_in,
    content_of,
    history,
    openai_error,
    pick,
    picture_url,
    reload,
    send,
    sent_bodies,
    turn,
)

pytest_plugins = ("tests.page_fixtures",)


# Edited


def edit_question(page: Page, number: int) -> None:
    page.get_by_role("button", name="Edit the question").nth(number - 1).click()
    expect(page.locator("#editing")).to_be_visible()
    expect(page.locator("#question")).to_be_focused()


def test_an_earlier_question_is_changed_and_sent_again(page: Page, red: Path, blue: Path) -> None:
    pick(page, red)
    ask(page, QUESTION)
    ask(page, "How many shapes are there?")
    edit_question(page, 1)
    expect(page.locator("#question")).to_have_value(QUESTION)
    assert content_of(page.locator("#attached img")) == picture_url(red)
    page.get_by_role("button", name="Remove picture 1").click()
    expect(page.locator("#attached img")).to_have_count(0)
    pick(page, blue)
    expect(page.locator("#attached img")).to_have_count(1)
    assert content_of(page.locator("#attached img")) == picture_url(blue)
    bodies = sent_bodies(page)
    send(page, "And what colour is this circle?")
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator(".measures")).to_have_count(1)
    assert "blue" in page.locator("article.assistant .content").inner_text()
    assert [message["role"] for message in bodies[0]["messages"]] == ["user"]
    messages = history(page)["messages"]
    assert messages[0]["content"] == f'<img src="{picture_url(blue)}">\nAnd what colour is this circle?'
    assert len(messages) == 2
    expect(page.locator("#editing")).to_be_hidden()
    reload(page)
    expect(page.locator("article")).to_have_count(2)


def test_the_second_question_keeps_what_came_before_it(page: Page, red: Path) -> None:
    pick(page, red)
    ask(page, QUESTION)
    ask(page, "Who are you?")
    edit_question(page, 2)
    expect(page.locator("#attached img")).to_have_count(0)
    bodies = sent_bodies(page)
    send(page, "How many shapes are there?")
    expect(page.locator("article")).to_have_count(4)
    expect(page.locator(".measures")).to_have_count(2)
    assert [message["role"] for message in bodies[0]["messages"]] == ["user", "assistant", "user"]
    assert page.locator("article.assistant .content").last.inner_text() == "one"


def test_escape_leaves_a_question_as_it_was(page: Page, red: Path) -> None:
    bring_in(page, turn(f'<img src="{picture_url(red)}">\nHello'))
    expect(page.locator("article")).to_have_count(2)
    page.fill("#question", "A draft")
    edit_question(page, 1)
    expect(page.locator("article.edited")).to_have_count(1)
    page.fill("#question", "Something else")
    page.get_by_role("button", name="Remove picture 1").click()
    reload(page)  # nothing of this is kept before it is sent
    expect(page.locator("#question")).to_have_value("A draft")
    ways: list[Callable[[], None]] = [
        lambda: page.press("#question", "Escape"),
        lambda: page.get_by_role("button", name="Cancel").click(),
    ]
    for end in ways:
        edit_question(page, 1)
        expect(page.locator("#attached img")).to_have_count(1)
        page.fill("#question", "Something else")
        end()
        expect(page.locator("#question")).to_have_value("A draft")
        expect(page.locator("#attached img")).to_have_count(0)
        expect(page.get_by_role("button", name="Edit the question")).to_be_focused()
    assert history(page) == turn(f'<img src="{picture_url(red)}">\nHello')


def test_a_changed_question_that_is_stopped_loses_nothing(page: Page) -> None:
    bring_in(page, turn("Hello"))
    expect(page.locator("article")).to_have_count(2)
    edit_question(page, 1)
    page.route(CHAT, lambda route: None)
    send(page, "Something else")
    expect(page.locator("article.assistant .pending")).to_be_visible()
    expect(page.get_by_role("button", name="Edit the question")).to_be_disabled()
    page.press("#question", "Escape")
    expect(page.locator("#question")).to_have_value("Something else")
    expect(page.locator("article.assistant")).to_contain_text("red")
    assert history(page) == turn("Hello")


# Without an answer


def test_a_failed_question_is_there_once(page: Page, red: Path) -> None:
    ask(page, "Who are you?")
    pick(page, red, red, red, red, red)
    expect(page.locator("#attached img")).to_have_count(5)
    send(page, QUESTION)
    problem = page.locator("article.failed .problem")
    expect(problem).to_contain_text("5 media items, the limit is 4 per request")
    expect(problem).to_contain_text("400 · invalid_request_error · messages · too_many_items")
    for _ in range(2):
        expect(page.get_by_text(QUESTION)).to_have_count(1)
        expect(page.locator("article.failed img")).to_have_count(5)
        expect(page.locator("#question")).to_have_value("")
        expect(page.locator("#attached img")).to_have_count(0)
        reload(page)
    assert len(history(page)["messages"]) == 2
    page.get_by_role("button", name="Edit the question").last.click()
    for number in range(4):
        expect(page.locator("#attached img")).to_have_count(5 - number)
        page.get_by_role("button", name="Remove picture 1").click()
    page.press("#question", "Enter")
    expect(page.locator(".measures")).to_have_count(2)
    assert page.locator("article.assistant .content").last.inner_text() == "red"
    expect(page.locator(".problem")).to_have_count(0)
    assert len(history(page)["messages"]) == 4


def test_a_question_that_is_retried_is_not_doubled(page: Page, red: Path) -> None:
    page.route(CHAT, lambda route: route.fulfill(**openai_error(500, "broken")), times=2)
    bodies = sent_bodies(page)
    pick(page, red)
    send(page, QUESTION)
    for number in (1, 2):
        expect(page.locator("article.failed .problem")).to_contain_text("broken")
        expect(page.locator("article")).to_have_count(1)
        assert len(bodies) == number
        page.get_by_role("button", name="Retry").click()
    expect(page.locator(".measures")).to_have_count(1)
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator(".problem")).to_have_count(0)
    assert [len(body["messages"]) for body in bodies] == [1, 1, 1]
    expect(page.locator("#question")).to_have_value("")


def test_a_failed_question_is_retried_after_the_page_was_away(page: Page) -> None:
    page.route(CHAT, lambda route: route.fulfill(**openai_error(500, "broken")), times=1)
    send(page, "Who are you?")
    expect(page.locator("article.failed")).to_have_count(1)
    reload(page)
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".measures")).to_have_count(1)
    expect(page.locator("article.failed")).to_have_count(0)


def test_a_failed_question_is_not_sent_with_the_next(page: Page) -> None:
    page.route(CHAT, lambda route: route.fulfill(**openai_error(500, "broken")), times=1)
    send(page, "Hello")
    expect(page.locator("article.failed")).to_have_count(1)
    bodies = sent_bodies(page)
    ask(page, "Who are you?")
    assert [message["content"] for message in bodies[0]["messages"]] == ["Who are you?"]
    expect(page.locator("article")).to_have_count(3)
    expect(page.get_by_role("button", name="Retry")).to_be_hidden()
    assert len(history(page)["messages"]) == 2


def test_a_question_without_an_answer_is_asked_again(page: Page) -> None:
    history_without_answer = turn("Who are you?")
    del history_without_answer["messages"][1]
    bring_in(page, history_without_answer)
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".measures")).to_have_count(1)
    expect(page.locator("article")).to_have_count(2)
