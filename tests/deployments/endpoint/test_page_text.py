"""Texts on the web page: links that are safe to follow, copies, and time in proportion to their length."""

from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.page_driver import bring_in, open_page, turn

pytest_plugins = ("tests.page_fixtures",)

DRAWN = """async ([text, isGrowing]) => {
  const { drawMarkdown } = await import("/page/chat/markdown.js");
  const container = document.createElement("div");
  drawMarkdown(container, text, isGrowing);
  return [container.textContent, [...container.querySelectorAll("a")].map((a) => [a.textContent, a.href])];
}"""


def drawn(page: Page, text: str, *, is_growing: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The text that is shown, and its links."""
    shown, links = page.evaluate(DRAWN, [text, is_growing])
    return shown, [(text, target) for text, target in links]


# Links


def test_a_link_opens_in_a_tab_that_learns_nothing(page: Page, context: BrowserContext, app_url: str) -> None:
    bring_in(page, turn("Where?", f"[Here](https://example.com/a_(b)), or at {app_url}/health."))
    links = page.locator("article.assistant a")
    expect(links).to_have_count(2)
    first, second = links.all()
    for link, text, target in (
        (first, "Here", "https://example.com/a_(b)"),
        (second, f"{app_url}/health", f"{app_url}/health"),
    ):
        expect(link).to_have_text(text)
        expect(link).to_have_attribute("href", target)
        expect(link).to_have_attribute("title", target)
        expect(link).to_have_attribute("target", "_blank")
        expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")
    with context.expect_page() as opened:
        second.click()
    opened.value.wait_for_load_state()
    assert opened.value.evaluate("[window.opener, document.referrer]") == [None, ""]


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("see https://example.com/a?b=c#d, then", {"https://example.com/a?b=c#d": "https://example.com/a?b=c#d"}),
        ("(https://example.com/a_(b))", {"https://example.com/a_(b)": "https://example.com/a_(b)"}),
        ("HTTP://EXAMPLE.COM.", {"HTTP://EXAMPLE.COM": "http://example.com/"}),
        ("**https://example.com**!", {"https://example.com": "https://example.com/"}),
        ("**[a](https://example.com) b**", {"a": "https://example.com/"}),
        ("[a](https://a.example) [b](http://b.example)", {"a": "https://a.example/", "b": "http://b.example/"}),
        (
            "[write](mailto:a@a.example) mailto:b@b.example",
            {"write": "mailto:a@a.example", "mailto:b@b.example": "mailto:b@b.example"},
        ),
        ("https://bücher.example/ü", {"https://bücher.example/ü": "https://xn--bcher-kva.example/%C3%BC"}),
        ("`https://example.com` `[a](https://example.com)`", {}),
        ("```\nhttps://example.com\n```", {}),
        ("xhttps://example.com http:// https://.", {}),
        ("[](https://example.com", {"https://example.com": "https://example.com/"}),
    ],
)
def test_addresses_become_links(page: Page, text: str, links: dict[str, str]) -> None:
    assert dict(drawn(page, text)[1]) == links


@pytest.mark.parametrize(
    "target",
    [
        "javascript:alert(1)",
        "JavaScript:alert(1)",
        "data:text/html,<script>alert(1)</script>",
        "data:text/html;base64,PHNjcmlwdD4=",
        "file:///etc/passwd",
        "vbscript:x",
        "//example.com",
        "/v1/models",
        "http:javascript:alert(1)",
        "https://",
        "http://[",
        "mailto:",
    ],
)
def test_other_addresses_stay_text(page: Page, target: str) -> None:
    text = f"[a]({target}) and {target}"
    assert drawn(page, text) == (text, [])


def test_no_link_is_shown_before_it_is_whole(page: Page) -> None:
    text = "[The docs](https://example.com/docs) and https://a.example/more/of.it, **http://b.example**\n\n"
    text += "https://c.example/x\n\nend"
    whole = drawn(page, text)[1]
    assert len(whole) == 4
    for end in range(len(text)):
        shown = drawn(page, text[:end], is_growing=True)[1]
        assert shown == whole[: len(shown)], text[:end]
    assert drawn(page, text, is_growing=True)[1] == whole


PIECES = ("[", "[[", "](", "[a](", "[a](b", "[a]()", "(", ")", "`", "*", "**", "**a", "a ", "x\n", "```\n")
ADDRESSES = ("http://", "mailto:", "https://a.b/(", "https://a.b)", "https://a.b. ")
MATHS = ("$", "$a", "\\(", "\\(a", "\\[", "~~a", "![")
PICTURES = ('<img src="', '<img src="data:image/png;base64,', '<video src="a"')


@pytest.mark.slow
def test_a_long_text_takes_time_in_proportion(page: Page) -> None:
    """Four times the text takes four times as long, or is quick anyway."""
    draw = """async ([start, piece, length]) => {
      const { drawMarkdown } = await import("/page/chat/markdown.js");
      const { partsOf } = await import("/page/chat/messages.js");
      const text = start + piece.repeat(length / piece.length) + '">';
      const begin = performance.now();
      drawMarkdown(document.createElement("div"), text);
      partsOf(text);
      return (performance.now() - begin) / 1000;
    }"""

    def in_proportion(start: str, piece: str) -> bool:
        short, long = (page.evaluate(draw, [start, piece, length]) for length in (100_000, 400_000))
        return bool(long < 1 or long < 10 * short)

    for start in ("", "[a](b"):
        for piece in PIECES + ADDRESSES + MATHS + PICTURES:
            # One measurement may have been disturbed by whatever else the machine does.
            assert any(in_proportion(start, piece) for _ in range(3)), (start, piece)


# Copies


ANSWER = "Look:\n\n```python\nprint('a')\n  # b\n```\n\n**Done** at https://example.com"
WITHOUT_CLIPBOARD = "Object.defineProperty(Navigator.prototype, 'clipboard', { get: () => undefined });"


def pasted(page: Page) -> str:
    """What the clipboard has, as the composer gets it."""
    page.fill("#question", "")
    page.press("#question", "Control+V")
    text: str = page.input_value("#question")
    return text


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_answers_and_code_are_copied(context: BrowserContext, page: Page, app_url: str, *, has_clipboard: bool) -> None:
    """A page that came over plain HTTP from another machine has no `navigator.clipboard`."""
    if not has_clipboard:
        context.add_init_script(WITHOUT_CLIPBOARD)
        page = open_page(context, app_url)
    bring_in(page, turn("Hello", ANSWER))
    for name, text in (("Copy the answer", ANSWER), ("Copy the code", "print('a')\n  # b")):
        button = page.get_by_role("button", name=name)
        button.click()
        expect(button).to_have_class("tool small copy done")
        expect(button).to_be_focused()
        expect(page.locator("[aria-live=polite] p").last).to_have_text("Copied")
        assert pasted(page) == text
    expect(page.locator(".copy.done")).to_have_count(0)


def test_a_browser_that_forbids_copying_says_so(page: Page) -> None:
    bring_in(page, turn("Hello", ANSWER))
    page.evaluate(
        "() => { document.execCommand = () => false; navigator.clipboard.writeText = () => Promise.reject(); }"
    )
    page.get_by_role("button", name="Copy the answer").click()
    expect(page.get_by_role("alert")).to_contain_text("does not let the page copy")


def test_code_that_still_comes_has_no_button_yet(page: Page) -> None:
    def num_buttons(text: str) -> Any:
        code = """async (text) => {
          const { drawMarkdown } = await import("/page/chat/markdown.js");
          const drawn = document.createElement("div");
          drawMarkdown(drawn, text, true);
          return drawn.querySelectorAll(".copy").length;
        }"""
        return page.evaluate(code, text)

    assert num_buttons("```\na") == 0
    assert num_buttons("```\na\n```\n\nmore") == 1
