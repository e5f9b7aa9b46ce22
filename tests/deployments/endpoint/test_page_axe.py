"""axe-core's view of the web page, in every look and in every state that a reader meets."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from raylens.checkpoints import PICTURES
from tests.axe import SCREENS, findings
from tests.deployments.endpoint.test_page_markdown import RICH
from tests.page_driver import CHAT, answer_with, ask, bring_in, open_list, open_page, openai_error, pick, send, turn

pytest_plugins = ("tests.page_fixtures",)

ADDRESS = f"https://example.org/{'an-address-without-an-end-' * 9}"
WIDE = f"A line that is wider than its place:\n\n    {'code ' * 60}\n\n{ADDRESS}"


@pytest.fixture(params=SCREENS)
def look(request: pytest.FixtureRequest, browser: Browser, app_url: str) -> Iterator[Page]:
    context = browser.new_context(**SCREENS[request.param])
    expect.set_options(timeout=20_000)
    yield open_page(context, app_url)
    context.close()


@pytest.mark.slow
def test_the_empty_page(look: Page) -> None:
    expect(look.locator(".example")).to_have_count(4)
    assert findings(look) == []
    look.locator("#status summary").click()
    assert findings(look) == []


def test_a_conversation(look: Page) -> None:
    pick(look, PICTURES / "one.png")
    expect(look.locator("#attached img")).to_have_count(1)
    assert findings(look) == []
    ask(look, "Describe the picture.")
    ask(look, "What colour is the cross?")
    assert findings(look) == []
    look.locator(".measures summary").last.click()
    expect(look.locator(".measures").last.locator(".chip")).to_have_count(2)
    assert findings(look) == []
    look.get_by_role("button", name="Edit the question").first.click()
    expect(look.locator("#editing")).to_be_visible()
    assert findings(look) == []


def test_an_answer_with_every_construct(look: Page) -> None:
    answer_with(look, RICH)
    send(look, "What does it say?")
    expect(look.locator(".maths .katex").first).to_be_visible()
    expect(look.locator(".hljs-keyword").first).to_be_visible()
    assert findings(look) == []


@pytest.mark.slow
def test_long_words(look: Page) -> None:
    bring_in(look, turn(WIDE, WIDE))
    expect(look.locator("article a")).to_have_count(1)
    assert findings(look) == []


@pytest.mark.slow
def test_an_answer_that_broke_off_and_others_beside_it(look: Page) -> None:
    answer_with(look, "The beginning", reason=None)
    send(look, "Hello")
    expect(look.locator("article.assistant .problem")).to_be_visible()
    assert findings(look) == []
    answer_with(look, "Another one")
    look.get_by_role("button", name="Ask again").click()
    expect(look.locator(".versions")).to_be_visible()
    assert findings(look) == []
    look.get_by_role("button", name="Settings", exact=True).click()
    look.get_by_role("button", name="Show as code").click()
    expect(look.locator("#code pre")).to_be_visible()
    assert findings(look) == []


@pytest.mark.slow
def test_the_form_for_the_key(look: Page) -> None:
    look.route("**/v1/models", lambda route: route.fulfill(**openai_error(401, "no API key was sent")))
    look.route("**/sign-in", lambda route: route.fulfill(**openai_error(401, "no API key was sent")))
    look.reload()
    look.get_by_label("API key").fill("rl-wrong")
    look.get_by_role("button", name="Sign in").click()
    expect(look.locator("#sign-in")).to_contain_text("does not know this key")
    assert findings(look) == []


@pytest.mark.slow
def test_a_failed_question(look: Page) -> None:
    trouble = openai_error(503, "still starting", **{"retry-after": "100"})
    look.route(CHAT, lambda route: route.fulfill(**trouble))
    pick(look, PICTURES / "one.png")
    expect(look.locator("#attached img")).to_have_count(1)
    send(look, "Who are you?")
    look.get_by_role("button", name="Retry now").wait_for()
    assert findings(look) == []
    look.get_by_role("button", name="Retry now").click()
    expect(look.locator("article.failed .problem")).to_be_visible()
    look.set_input_files("#media-files", __file__)
    expect(look.locator(".notice")).to_be_visible()
    assert findings(look) == []


@pytest.mark.slow
def test_the_settings(look: Page) -> None:
    look.get_by_role("button", name="Settings", exact=True).click()
    look.fill("#temperature", "1")
    assert findings(look) == []
    look.fill("#temperature", "7")
    assert findings(look) == []


@pytest.mark.slow
def test_the_list_of_conversations(look: Page) -> None:
    open_list(look)
    assert findings(look) == []
    look.keyboard.press("Escape")
    for question in ("One", "Two", "Three"):
        bring_in(look, turn(f"{question} rather long question about very many things in a picture"))
        expect(look.locator("article.user")).to_contain_text(question)
    open_list(look)
    assert findings(look) == []
    look.get_by_role("button", name="Delete “One").click()
    look.get_by_role("button", name="Rename “Two").click()
    assert findings(look) == []
