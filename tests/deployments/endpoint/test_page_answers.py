"""Answers on the web page: they break off and go on, several are kept beside each other, thoughts are folded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, Route, ViewportSize, expect

from raylens.checkpoints import PICTURES
from tests.page_driver import (
    CHAT,
    QUESTION,
    answer_with,
    ask,
    bring_in,
    open_list,
    open_page,
    pick,
    reload,
    send,
    sent_bodies,
    turn,
)

pytest_plugins = ("tests.page_fixtures",)

DESCRIBE = "Describe the picture."
WIDE: ViewportSize = {"width": 1440, "height": 800}


def last(page: Page) -> Locator:
    return page.locator("article.assistant").last


def test_an_answer_that_breaks_off_goes_on_where_it_ended(page: Page) -> None:
    """The whole answer is the one that comes without a break."""
    pick(page, PICTURES / "one.png")
    whole = ask(page, DESCRIBE)
    begun = whole[: len(whole) // 2].rpartition(",")[0]
    page.get_by_role("button", name="New conversation").click()
    pick(page, PICTURES / "one.png")
    answer_with(page, begun, reason=None)
    send(page, DESCRIBE)
    problem = last(page).locator(".problem")
    expect(problem).to_contain_text("The connection was lost in the middle of the answer.")
    expect(last(page).locator(".content")).to_have_text(begun)
    expect(page.get_by_role("button", name="Regenerate")).to_be_hidden()
    reload(page)
    expect(problem).to_be_visible()
    bodies = sent_bodies(page)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".measures")).to_have_count(1)
    expect(last(page).locator(".content")).to_have_text(whole)
    expect(page.locator(".problem")).to_have_count(0)
    assert bodies[0]["messages"][-1] == {"role": "assistant", "content": begun}
    assert (bodies[0]["add_generation_prompt"], bodies[0]["continue_final_message"]) == (False, True)


def test_an_answer_that_cannot_go_on_stays(page: Page) -> None:
    answer_with(page, "The beginning", reason=None)
    send(page, "Hello")
    expect(last(page).locator(".problem")).to_be_visible()
    page.route(CHAT, lambda route: route.abort(), times=1)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".notice")).to_contain_text("The server cannot be reached")
    expect(last(page).locator(".content")).to_have_text("The beginning")
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".measures")).to_have_count(1)
    expect(last(page).locator(".versions")).to_contain_text("2 of 2")


def test_other_answers_are_kept(page: Page) -> None:
    bring_in(page, turn("Hello", "first"))
    for number, text in enumerate(("second", "third"), start=2):
        answer_with(page, text)
        page.get_by_role("button", name="Regenerate").click()
        expect(last(page).locator(".versions")).to_contain_text(f"{number} of {number}")
    before, after = (last(page).get_by_role("button", name=name) for name in ("Answer before", "Next answer"))
    expect(after).to_be_disabled()
    before.click()
    expect(last(page).locator(".content")).to_have_text("second")
    before.click()
    expect(last(page).locator(".content")).to_have_text("first")
    expect(before).to_be_disabled()
    after.click()
    reload(page)
    expect(last(page).locator(".content")).to_have_text("second")
    expect(last(page).locator(".versions")).to_contain_text("2 of 3")
    bodies = sent_bodies(page)
    ask(page, "And now?")
    assert [message["content"] for message in bodies[0]["messages"]] == ["Hello", "second", "And now?"]
    expect(page.locator(".versions")).to_be_hidden()


def test_thoughts_are_folded(page: Page) -> None:
    deltas = [{"reasoning_content": "First I **look**"}, {"reasoning_content": " at it."}, {"content": "It is red."}]
    events = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    page.route(CHAT, lambda route: route.fulfill(body=body, content_type="text/event-stream"), times=1)
    send(page, QUESTION)
    thoughts = last(page).locator(".thoughts")
    expect(last(page).locator(".content")).to_have_text("It is red.")
    expect(thoughts.locator("summary")).to_have_text("Thoughts")
    expect(thoughts.locator("div")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator("div")).to_have_text("First I look at it.")
    expect(thoughts.locator("strong")).to_have_text("look")
    bodies = sent_bodies(page)
    ask(page, "And now?")
    assert bodies[0]["messages"][1] == {"role": "assistant", "content": "It is red."}


def test_the_speaker_is_the_model(page: Page) -> None:
    ask(page, "Hello")
    expect(last(page).get_by_role("heading")).to_have_text("shapes")


def test_the_way_to_the_end_is_shown_where_it_is_out_of_sight(page: Page) -> None:
    bring_in(page, turn("Hello", "\n\n".join(["A paragraph."] * 60)))
    to_end = page.get_by_role("button", name="To the end")
    expect(to_end).to_be_hidden()
    page.locator("#scroll").evaluate("(node) => node.scrollTo(0, 0)")
    to_end.click()
    expect(to_end).to_be_hidden()
    expect(page.locator("article").last.locator(".foot")).to_be_in_viewport()


# Models


def cards(route: Route) -> None:
    names = {"large": None, "small": None, "invoices": "large"}
    modalities = {"large": ["image", "video"], "small": ["image"], "invoices": ["image", "video"]}
    data = [{"id": name, "parent": parent, "modalities": modalities[name]} for name, parent in names.items()]
    route.fulfill(json={"object": "list", "data": data})


def test_each_conversation_has_its_model_and_each_model_its_settings(
    context: BrowserContext, page: Page, app_url: str
) -> None:
    context.route("**/v1/models", cards)
    page = open_page(context, app_url, "largesmallinvoices (adapter of large)")
    chosen = page.get_by_role("combobox", name="Model")
    expect(chosen).to_have_value("large")
    bodies = sent_bodies(page)

    def set_temperature(value: str) -> None:
        page.get_by_role("button", name="Settings").click()
        page.fill("#temperature", value)
        page.keyboard.press("Escape")

    set_temperature("0.5")
    answer_with(page, "one")
    send(page, "Hello")
    expect(last(page)).to_contain_text("one")
    chosen.select_option("invoices")
    set_temperature("0.9")
    answer_with(page, "two")
    send(page, "And now?")
    expect(last(page).get_by_role("heading")).to_have_text("invoices")
    assert [(body["model"], body["temperature"]) for body in bodies] == [("large", 0.5), ("invoices", 0.9)]
    page.get_by_role("button", name="New conversation").click()
    expect(chosen).to_have_value("invoices")
    chosen.select_option("small")
    expect(page.get_by_role("button", name="Add pictures and PDFs")).to_be_visible()
    reload(page)
    expect(chosen).to_have_value("small")
    open_list(page).locator(".open", has_text="Hello").click()
    expect(chosen).to_have_value("invoices")
    expect(page.locator("#temperature")).to_have_value("0.9")
    expect(page.get_by_role("button", name="Add pictures, PDFs and videos")).to_be_visible()


# The conversation as a program


@pytest.mark.parametrize("language", ["curl", "Python", "JavaScript"])
def test_a_conversation_runs_as_a_program(page: Page, tmp_path: Path, language: str) -> None:
    runs = {"curl": ["bash"], "Python": [sys.executable], "JavaScript": ["node", "--input-type=module"]}
    if shutil.which(runs[language][0]) is None or shutil.which("curl" if language == "curl" else "true") is None:
        pytest.skip(f"{language} is not installed")
    page.get_by_role("button", name="Settings").click()
    page.fill("#temperature", "0")
    page.fill("#top_k", "1")
    page.fill("#system", 'Answer `briefly`, "$HOME" \\ true.')
    page.keyboard.press("Escape")
    picture = PICTURES / "one.png"
    pick(page, picture)
    answer = ask(page, DESCRIBE)
    shutil.copy(picture, tmp_path / "medium-1.png")
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Show as code").click()
    expect(page.locator("#code-files")).to_have_text("It reads medium-1.png from its folder.")
    page.get_by_role("button", name=language, exact=True).click()
    program = page.locator("#code pre").inner_text()
    environment = {"PATH": os.environ["PATH"], "RAYLENS_API_KEY": "none"}
    told = subprocess.run(
        runs[language], input=program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout
    said = json.loads(told)["choices"][0]["message"]["content"] if language == "curl" else told.rstrip("\n")
    assert said == answer


# The list beside the page


def test_the_list_stays_beside_a_wide_page(context: BrowserContext, app_url: str) -> None:
    page = open_page(context, app_url)
    page.set_viewport_size(WIDE)
    bring_in_two(page)
    panel = page.locator("#conversations")
    if not panel.is_visible():
        page.get_by_role("button", name="Conversations", exact=True).click()
    rows = panel.locator(".open")
    expect(rows).to_have_count(2)
    rows.filter(has_text="first").click()
    expect(page.locator("article.user")).to_contain_text("first")
    expect(panel).to_be_visible()
    expect(rows.filter(has_text="first")).to_have_attribute("aria-current", "true")
    ask(page, "A third question")
    page.fill("#search", "THIRD")
    expect(rows).to_have_count(1)
    page.fill("#search", "nothing has this")
    expect(page.locator("#no-conversations")).to_have_text("None has these words.")
    page.fill("#search", "")
    reload(page)
    expect(rows).to_have_count(2)
    panel.get_by_role("button", name="Delete “The first one").click()
    expect(panel.get_by_role("button", name="Undo")).to_be_visible()
    panel.get_by_role("button", name="Undo").click()
    expect(rows).to_have_count(2)
    left = page.locator("header").bounding_box()
    assert left is not None
    assert left["x"] > 250
    page.set_viewport_size({"width": 800, "height": 800})
    expect(panel).to_be_hidden()


def bring_in_two(page: Page) -> None:
    page.set_viewport_size({"width": 1000, "height": 800})
    for name in ("first", "second"):
        bring_in(page, turn(f"The {name} one"))
    page.set_viewport_size(WIDE)
