"""The settings of the web page: within the server's ranges, and out of the way."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.page_driver import ask, send, sent_bodies

pytest_plugins = ("tests.page_fixtures",)


def open_settings(page: Page) -> None:
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(page.locator("#settings")).to_be_visible()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", "2.1", "from 0 to 2"),
        ("temperature", "-0.1", "from 0 to 2"),
        ("top_p", "0", "above 0, at most 1"),
        ("top_p", "1.01", "above 0, at most 1"),
        ("top_k", "-1", "a whole number, at least 0"),
        ("top_k", "1.5", "a whole number"),
        ("max_tokens", "0", "a whole number, at least 1"),
        ("seed", "0.5", "a whole number"),
        ("seed", "1e300", "at most 15 digits"),
        ("stop_strings", "\n".join("abcdefghijklmnopq"), "at most 16"),
        ("stop_strings", "a" * 257, "up to 256 characters"),
    ],
)
def test_a_value_out_of_range_is_marked_and_not_sent(page: Page, name: str, value: str, allowed: str) -> None:
    open_settings(page)
    field = page.locator(f"#{name}")
    field.fill(value)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator(f"#{name}-range")).to_have_text(re.compile(f"^Not sent. Allowed: .*{allowed}"))
    expect(page.locator("[aria-invalid=true]")).to_have_count(1)
    page.keyboard.press("Escape")
    bodies = sent_bodies(page)
    send(page, "Who are you?")
    expect(field).to_be_focused()
    expect(page.locator("article")).to_have_count(0)
    expect(page.locator("#question")).to_have_value("Who are you?")
    assert bodies == []
    field.fill("")
    expect(field).to_have_attribute("aria-invalid", "false")
    page.keyboard.press("Escape")
    page.press("#question", "Enter")
    expect(page.locator(".measures")).to_have_count(1)


def test_what_is_no_number_is_marked(page: Page) -> None:
    open_settings(page)
    page.locator("#temperature").press_sequentially("1e")
    expect(page.locator("#temperature")).to_have_attribute("aria-invalid", "true")


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0, "top_p": 1, "top_k": 0, "max_tokens": 1, "seed": -999_999_999_999_999},
        {"temperature": 2, "top_p": 0.001, "top_k": 1000, "max_tokens": 5, "seed": 999_999_999_999_999},
        {"temperature": 0.123},
    ],
)
def test_the_server_takes_what_is_in_range(page: Page, given: dict[str, float]) -> None:
    open_settings(page)
    for name, value in given.items():
        page.fill(f"#{name}", str(value))
    page.fill("#stop_strings", "a" * 256 + "\nb" * 15)
    expect(page.locator("[aria-invalid=true]")).to_have_count(0)
    page.keyboard.press("Escape")
    bodies = sent_bodies(page)
    ask(page, "Who are you?")
    assert bodies[0].items() >= given.items()


def test_the_settings_close(page: Page) -> None:
    toggle = page.get_by_role("button", name="Settings", exact=True)
    ways: list[Callable[[], None]] = [
        lambda: page.get_by_role("button", name="Close").click(),
        lambda: page.keyboard.press("Escape"),
        lambda: page.mouse.click(50, 300),
    ]
    for close in ways:
        open_settings(page)
        page.locator("#temperature").click()
        expect(page.locator("#settings")).to_be_visible()
        close()
        expect(page.locator("#settings")).to_be_hidden()
        expect(toggle).to_be_focused()


def test_the_list_of_conversations_closes(page: Page) -> None:
    toggle = page.get_by_role("button", name="Conversations", exact=True)
    width = page.evaluate("innerWidth")
    ways: list[Callable[[], None]] = [
        lambda: page.get_by_role("button", name="Close").click(),
        lambda: page.keyboard.press("Escape"),
        lambda: page.mouse.click(width - 50, 300),
    ]
    for close in ways:
        toggle.click()
        expect(page.locator("#conversations")).to_be_visible()
        close()
        expect(page.locator("#conversations")).to_be_hidden()
        expect(toggle).to_be_focused()
