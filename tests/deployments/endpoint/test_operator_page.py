"""The operator's page in a real Chromium, on the real application."""

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest
import yaml
from openai import BadRequestError, OpenAI
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from raylens.deployments.config import AppConfig
from raylens.deployments.endpoint.api_keys import hash_key
from tests.axe import SCREENS, findings
from tests.page_driver import Watch, openai_error
from tests.pictures import disc, encoded, user_message
from tests.replicas import replica_pids

pytest_plugins = ("tests.page_fixtures",)

DATA = "**/dashboard/data"
KEYS = {"root": "rl-root", "alice": "rl-alice"}
ADMIN = {"authorization": f"Bearer {KEYS['root']}"}
PICTURES = count()


@pytest.fixture(scope="module")
def app_config(shapes: str, tmp_path_factory: pytest.TempPathFactory) -> AppConfig:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    entries = [{"name": name, "sha256": hash_key(key), "admin": name == "root"} for name, key in KEYS.items()]
    file.write_text(yaml.safe_dump(entries))
    return AppConfig.model_validate({"model": shapes, "auth": {"keys_file": str(file)}})


@pytest.fixture(scope="module")
def alice(app_url: str) -> OpenAI:
    return OpenAI(base_url=f"{app_url}/v1", api_key=KEYS["alice"], max_retries=0, timeout=60)


@pytest.fixture
def dashboard(browser: Browser, app_url: str) -> Iterator[Page]:
    """The page; nothing of what it does may break its policy or leave its origin."""
    context = _context(browser)
    page = context.new_page()
    watch = Watch(page, app_url)
    _open(page, app_url)
    yield page
    context.close()
    assert watch.complaints == []


def _context(browser: Browser, **options: Any) -> BrowserContext:
    """A browser whose user has given the admin's key."""
    expect.set_options(timeout=20_000)
    return browser.new_context(extra_http_headers=ADMIN, **options)


def _open(page: Page, url: str) -> None:
    page.goto(f"{url}/dashboard")
    expect(page.locator("#state")).to_have_text("Live")


def ask(client: OpenAI, picture: bytes, times: int = 1) -> int:
    """Asks about the picture and returns how many tokens the answers have."""
    message = user_message("What colour is the circle?", picture)
    answers = [client.chat.completions.create(model="shapes", messages=[message]) for _ in range(times)]
    return sum(answer.usage.completion_tokens for answer in answers if answer.usage)


def new_picture() -> bytes:
    """Another file than all before."""
    return encoded(disc("red", (96, 96), (36, 36))) + str(next(PICTURES)).encode()


def row(page: Page, table: str, name: str) -> dict[str, str]:
    """A row of a table by the titles of its columns."""
    titles = page.locator(f"#{table} thead th").all_inner_texts()
    cells = page.locator(f"#{table} tbody tr").filter(has=page.locator("th", has_text=name)).first
    return dict(zip(titles, cells.locator("th, td").all_inner_texts(), strict=True))


def noted(page: Page, what: str) -> int:
    """A number since the start, as in "1,234 requests ended"."""
    text = page.locator("#notes li", has_text=what).inner_text()
    return int(text.split()[0].replace(",", ""))


def errors(page: Page) -> int:
    return int(page.locator(".tile", has_text="Errors").locator(".detail").inner_text().split()[0].replace(",", ""))


def test_what_it_shows_is_what_was_asked(dashboard: Page, alice: OpenAI) -> None:
    ask(alice, new_picture())
    caches = dashboard.locator("#caches tbody tr").filter(has_text="embeddings").locator("td").first
    expect(caches).not_to_have_text("–")
    # Until nothing of what came before is in the window.
    expect(caches).to_have_text("–")
    ended, generated = noted(dashboard, "requests ended"), noted(dashboard, "tokens generated")
    failed, of_alice = errors(dashboard), int(row(dashboard, "keys", "alice")["Requests"])
    num_tokens = ask(alice, new_picture(), 4)
    with pytest.raises(BadRequestError, match="temperature"):
        alice.chat.completions.create(model="shapes", messages=[user_message("Hello")], temperature=9)
    expect(dashboard.locator("#notes")).to_contain_text(f"{ended + 4:,} requests ended")
    expect(dashboard.locator("#notes")).to_contain_text(f"{generated + num_tokens:,} tokens generated")
    expect(caches).to_have_text("75.0 %")
    expect(dashboard.locator(".tile", has_text="Errors").locator(".value")).to_have_text("20.0 %")
    assert errors(dashboard) == failed + 1
    assert int(row(dashboard, "keys", "alice")["Requests"]) == of_alice + 4, "without the one that is no request"
    tile = dashboard.locator(".tile", has_text="TTFT").locator(".value")
    assert re.fullmatch(r"[\d.]+ m?s", tile.inner_text())
    assert float(dashboard.locator(".tile", has_text="Requests/s").locator(".value").inner_text()) > 0


def test_it_shows_every_replica_and_stage(dashboard: Page) -> None:
    for deployment in ("Ingress", "Preprocess", "Generate", "Shared-0"):
        pids = replica_pids(deployment)
        assert pids
        expect(dashboard.locator("#replicas tbody th", has_text=f"{deployment} ")).to_have_count(len(pids))
        assert row(dashboard, "deployments", deployment)["Replicas"] == str(len(pids))
    assert re.fullmatch(r"[\d.]+ %", row(dashboard, "replicas", "Generate")["KV cache"])
    assert {"preprocess", "generate", "shared"} <= set(dashboard.locator("#stages li").all_inner_texts())
    assert row(dashboard, "budgets", "requests")["Of"] == "256"


def test_the_lines_grow(dashboard: Page) -> None:
    line = dashboard.locator(".tile", has_text="Waiting").locator("path")
    expect(line).to_have_attribute("d", re.compile(r"^M\S+ \S+h\.01(L\S+ \S+){2,}$"))


@pytest.mark.slow
def test_a_server_that_is_away_is_missed_and_found_again(dashboard: Page) -> None:
    silence, state = dashboard.locator("#silence"), dashboard.locator("#state")
    expect(silence).to_be_hidden()
    shown = row(dashboard, "deployments", "Generate")
    dashboard.route(DATA, lambda route: route.abort())
    expect(silence).to_have_text(re.compile(r"^No data since \d+ s: the server does not answer$"))
    expect(state).to_have_text("No data")
    expect(silence).to_contain_text("No data since 9 s")
    assert row(dashboard, "deployments", "Generate") == shown, "what was known last stays"
    trouble = openai_error(503, "no node tells its metrics now, try again")
    dashboard.unroute(DATA)
    dashboard.route(DATA, lambda route: route.fulfill(**trouble))
    expect(silence).to_contain_text("the server answers 503: no node tells its metrics now, try again")
    dashboard.unroute(DATA)
    expect(silence).to_be_hidden()
    expect(state).to_have_text("Live")


@pytest.mark.slow
def test_a_hidden_tab_asks_nothing(dashboard: Page) -> None:
    dashboard.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    dashboard.wait_for_timeout(2500)
    asked: list[str] = []
    dashboard.on("request", lambda request: asked.append(request.url))
    dashboard.wait_for_timeout(4500)
    assert asked == []
    dashboard.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    with dashboard.expect_request(DATA):
        pass
    expect(dashboard.locator("#silence")).to_be_hidden()


def test_only_admins_get_it(app_url: str, browser: Browser) -> None:
    for path in ("/dashboard/data", "/metrics"):
        answer = httpx.get(app_url + path, headers={"authorization": f"Bearer {KEYS['alice']}"})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "forbidden"
        assert "admin" in answer.json()["error"]["message"]
        assert "root" not in answer.text
        assert httpx.get(app_url + path).status_code == 401
        assert httpx.get(app_url + path, headers=ADMIN, timeout=20).status_code == 200
    page = browser.new_page()
    page.goto(f"{app_url}/dashboard")
    form = page.get_by_role("dialog", name="Sign in")
    expect(form).to_contain_text("No API key was sent")
    form.get_by_label("API key").fill(KEYS["alice"])
    form.get_by_role("button", name="Sign in").click()
    expect(form).to_contain_text("This route takes an admin's API key")
    form.get_by_label("API key").fill(KEYS["root"])
    form.get_by_role("button", name="Sign in").click()
    expect(page.locator("#state")).to_have_text("Live")
    page.context.close()


def test_it_runs_its_own_script_and_no_other(app_url: str) -> None:
    response = httpx.get(f"{app_url}/dashboard", headers=ADMIN)
    assert response.headers["content-security-policy"] == httpx.get(app_url).headers["content-security-policy"]
    assert not re.search(r'<style|<script(?! )|(?:src|href)="(?!#|data:|/"|page/)', response.text)


@pytest.mark.parametrize(
    "screen", [pytest.param(one, marks=[] if one == "phone" else pytest.mark.slow) for one in SCREENS]
)
def test_axe_finds_nothing(browser: Browser, app_url: str, alice: OpenAI, screen: str) -> None:
    ask(alice, new_picture())
    context = _context(browser, **SCREENS[screen])
    page = context.new_page()
    _open(page, app_url)
    expect(page.locator("#keys tbody tr").first).to_be_visible()
    assert findings(page) == []
    page.route(DATA, lambda route: route.abort())
    expect(page.locator("#silence")).to_be_visible()
    assert findings(page) == []
    context.close()


def test_the_keyboard_reaches_all_and_the_theme_stays(dashboard: Page) -> None:
    reached = []
    for _ in range(7):
        dashboard.keyboard.press("Tab")
        reached.append(dashboard.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent"))
    assert reached == ["Chat", "Dark theme", "Deployments", "Caches", "Admission", "API keys", "Replicas"]
    dashboard.get_by_role("button", name="Dark theme").press("Enter")
    dashboard.reload()
    expect(dashboard.get_by_role("button", name="Dark theme")).to_have_attribute("aria-pressed", "true")
    assert dashboard.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


def test_thirty_two_replicas_are_drawn_at_once(dashboard: Page, app_url: str) -> None:
    """A drawing takes less than a frame of 50 ms, on whatever machine the tests run."""
    figures = httpx.get(f"{app_url}/dashboard/data", headers=ADMIN, timeout=20).json()
    engine = next(one for one in figures["replicas"] if one["kv_usage"] is not None)
    figures["replicas"] = [{**engine, "name": f"replica{n}", "kv_usage": n / 32} for n in range(32)]

    def answer(route: Route) -> None:
        route.fulfill(json=figures)

    dashboard.route(DATA, answer)
    expect(dashboard.locator("#replicas tbody tr")).to_have_count(32)
    spent = dashboard.evaluate(
        """async (figures) => {
          const { show } = await import("/page/operator/operator.js");
          const times = [];
          for (let i = 0; i < 150; i += 1) { // five minutes' worth
            const began = performance.now();
            show(figures);
            document.body.offsetHeight; // laid out, too
            times.push(performance.now() - began);
          }
          return times.sort((a, b) => a - b)[75];
        }""",
        figures,
    )
    assert spent < 50
