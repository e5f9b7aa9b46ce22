"""The commands and programs of docs/curl.md and docs/recipes.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[3]
CURL = (ROOT / "docs" / "curl.md").read_text()
RECIPES = (ROOT / "docs" / "recipes.md").read_text()


def blocks(page: str, language: str) -> str:
    return "".join(re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL))


def output_of(command: list[str], script: str, app_url: str, folder: Path) -> str:
    script = script.replace("http://127.0.0.1:8000", app_url).replace("/tmp/", f"{folder}/")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        [*command, script], cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr
    return ran.stderr + ran.stdout


def test_every_curl_command_is_answered(app_url: str, tmp_path: Path) -> None:
    failing = 'set -e\ncurl() { command curl --fail-with-body --max-time 20 "$@"; }\n'
    output_of(["bash", "-c"], failing + blocks(CURL, "sh"), app_url, tmp_path)


def test_every_route_has_a_curl_command(app_url: str) -> None:
    routes = httpx.get(f"{app_url}/openapi.json").json()["paths"]
    patterns = {route: re.sub(r"\\{\w+\\}", r"[^/\\s]+", re.escape(route)) + r"(?=[\s|])" for route in routes}
    assert [route for route, pattern in patterns.items() if not re.search(f":8000{pattern}", CURL)] == ["/classify"]


def test_the_recipes_work(app_url: str, tmp_path: Path) -> None:
    assert output_of([sys.executable, "-c"], blocks(RECIPES, "python"), app_url, tmp_path) == "three\n"
    told = output_of(["bash", "-c"], blocks(RECIPES, "sh"), app_url, tmp_path)
    assert f"```\n{told.replace(str(tmp_path), '/tmp')}```" in RECIPES
