"""Answers in Markdown on the web page: every construct has its form, hostile ones stay text, and growing ones are calm.

tests/deployments/endpoint/test_page_text.py has links and copies."""

from playwright.sync_api import Page, expect

from tests.page_driver import answer_with, send

pytest_plugins = ("tests.page_fixtures",)

RICH = r"""# Title

A paragraph with **bold**, *italic*, ~~struck~~, `code`, [a link](https://example.com/a_(b)) and https://example.org.
Its second line.

## Table

| Item | Pieces | Price |
|:-----|:------:|------:|
| Bolt **M8** | 12 | 3.40 |
| `nut` | 24 | 1.20 |

3. third
   - nested
   - more
4. fourth

   with a paragraph

- [ ] open
- [x] done

> A quote
>
> > in a quote

---

```python
def total(items: list[int]) -> int:
    return sum(items)  # all
```

```
plain
```

    indented

Inline $E = mc^2$ and \(\sqrt{x}\), but 5$ and 6$.

$$
\int_0^1 x^2\,dx = \frac{1}{3}
$$

\[ \sum_{i=1}^n i \]

Wrong: $\frac{1$ and $\nosuchcommand{x}$.

![a chart](https://example.com/chart.png)
"""

ATTACKS = (
    "<script>window.wasRun = 1</script>",
    "<img src=x onerror='window.wasRun = 1'>",
    "<svg onload='window.wasRun = 1'><animate onbegin='window.wasRun = 1'/></svg>",
    "<iframe srcdoc='<script>parent.wasRun = 1</script>'></iframe>",
    "<style>* { display: none }</style>",
    "[link](javascript:window.wasRun=1)",
    "[data](data:text/html;base64,PHNjcmlwdD4=)",
    "![picture](javascript:window.wasRun=1)",
    "![svg](data:image/svg+xml;base64,PHN2Zy8+)",
    "<a href='javascript:window.wasRun=1'>a</a>",
    '<a href="https://example.com" onclick="window.wasRun=1">b</a>',
)
MATHS_ATTACKS = (
    r"$\href{javascript:window.wasRun=1}{x}$",
    r"$\htmlStyle{display:none}{x}$",
    r"$\includegraphics{https://example.com/a.png}$",
    r"$\def\a{\a\a}\a$",
    r"$\url{https://example.com}$",
)


def test_every_construct_has_its_form(page: Page) -> None:
    answer_with(page, RICH)
    send(page, "What does it say?")
    text = page.locator("article.assistant .content")
    expect(text.locator("h3")).to_have_text("Title")
    expect(text.locator("h4")).to_have_text("Table")
    for tag, content in (("strong", "bold"), ("em", "italic"), ("s", "struck"), ("p > code", "code")):
        expect(text.locator(tag).first).to_have_text(content)
    expect(text.locator("p br")).to_have_count(1)
    links = [(link.inner_text(), link.get_attribute("href")) for link in text.locator("a").all()]
    assert links == [
        ("a link", "https://example.com/a_(b)"),
        ("https://example.org", "https://example.org/"),
        ("a chart", "https://example.com/chart.png"),
    ]
    expect(text.locator("th")).to_have_text(["Item", "Pieces", "Price"])
    cells = text.locator("tbody tr").first.locator("td")
    expect(cells).to_have_text(["Bolt M8", "12", "3.40"])
    assert cells.evaluate_all("(all) => all.map((one) => one.style.textAlign)") == ["left", "center", "right"]
    expect(text.locator("ol")).to_have_attribute("start", "3")
    expect(text.locator("ol > li > ul > li")).to_have_text(["nested", "more"])
    expect(text.locator("ol > li > p")).to_have_text(["third", "fourth", "with a paragraph"])
    expect(text.locator(":scope > ul > li")).to_have_text(["☐ open", "☑ done"])
    expect(text.locator("blockquote blockquote")).to_have_text("in a quote")
    expect(text.locator("hr")).to_have_count(1)
    expect(text.locator(".code pre")).to_have_text(
        ["def total(items: list[int]) -> int:\n    return sum(items)  # all", "plain", "indented"]
    )
    expect(text.locator(".code .head span")).to_have_text(["python", "text", "text"])
    expect(text.locator(".hljs-keyword")).to_have_text(["def", "return"])
    expect(text.locator(".hljs-comment")).to_have_text("# all")
    expect(text.locator(".maths .katex")).to_have_count(4)
    expect(text.locator(".maths.block .katex-display")).to_have_count(2)
    expect(text.locator(".maths math")).to_have_count(4)  # what a screen reader reads
    expect(text.locator(".maths.wrong")).to_have_text([r"\frac{1", r"\nosuchcommand{x}"])
    expect(text).to_contain_text("but 5$ and 6$.")
    family = text.locator(".katex .mathnormal").first.evaluate("(node) => getComputedStyle(node).fontFamily")
    assert "KaTeX" in family
    assert page.evaluate("document.fonts.check('16px KaTeX_Math')")


def test_hostile_markup_stays_text(page: Page) -> None:
    answer_with(page, "\n\n".join([*ATTACKS, *MATHS_ATTACKS]))
    send(page, "What does it say?")
    text = page.locator("article.assistant .content")
    expect(text.locator(".maths.wrong").first).to_be_visible()
    for attack in ATTACKS:
        expect(text).to_contain_text(attack)
    assert text.locator("script, img, svg svg, iframe, style, form, object, [onclick], [onerror]").count() == 0
    assert [link.get_attribute("href") for link in text.locator("a").all()] == ["https://example.com/"]
    page.wait_for_timeout(200)
    assert page.evaluate("window.wasRun") is None


def test_a_growing_answer_is_calm(page: Page) -> None:
    """Every beginning of the answer shows whole constructs only. A block that has ended is never drawn again."""
    page.evaluate("import('/page/vendor/katex.min.js')")
    problems = page.evaluate(
        """async (text) => {
          const { drawMarkdown } = await import("/page/chat/markdown.js");
          const growing = document.createElement("div");
          const problems = [];
          let ended = [];
          for (let end = 1; end <= text.length; end += 1) {
            drawMarkdown(growing, text.slice(0, end), true);
            const shown = [...growing.childNodes].filter((node) => !node.matches?.(".code, .maths.block"));
            const raw = /\\*|\\]\\(|```|~~|^#|\\|/m.exec(shown.map((node) => node.textContent).join("\\n"));
            if (raw) problems.push([text.slice(0, end).slice(-30), raw[0]]);
            const again = ended.filter((node) => node.parentNode !== growing);
            if (again.length) problems.push([text.slice(0, end).slice(-30), "drawn again", again[0].textContent]);
            ended = [...growing.childNodes].slice(0, -2);
          }
          const whole = document.createElement("div");
          drawMarkdown(growing, text);
          drawMarkdown(whole, text);
          if (growing.innerHTML !== whole.innerHTML) problems.push(["the end", "differs"]);
          return problems;
        }""",
        RICH,
    )
    assert problems == []
