"""A benchmark's options, and its result: one JSON document, printed as its last line."""

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def make_parser(description: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Returns a parser with the option `--output`, and with `--rounds` if its default is given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the JSON document there")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="of all measurements; default: %(default)s")
    return parser


def publish(document: dict[str, Any], output: Path | None) -> None:
    """Prints the document, and also writes it to the file `output` if given."""
    save(document, output)
    print(json.dumps(document))


def save(document: dict[str, Any], output: Path | None) -> None:
    """Writes the possibly partial document to the file `output` if given. The file always holds a complete JSON
    document, even if this process dies."""
    if output is not None:
        half = output.with_name(f"{output.name}.half")
        half.write_text(json.dumps(document, indent=1) + "\n")
        half.replace(output)


def at_most(value: float, target: float) -> dict[str, Any]:
    return {"value": value, "target": target, "ok": value <= target}


def at_least(value: float, target: float) -> dict[str, Any]:
    return {"value": value, "target": target, "ok": value >= target}


def this_machine(**settings: Any) -> dict[str, Any]:
    """Returns the factors of a figure besides the code: processor, system, and a benchmark's own `settings`."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        **settings,
        "torch": version("torch"),
    }


def _processor() -> str:
    """Returns the processor's name and generation; a virtual machine's name hides the latter."""
    text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    fields = dict(line.replace("\t", "").split(": ", 1) for line in text.splitlines() if ": " in line)
    names = [fields.get("model name", platform.machine())]
    return ", ".join(names + [f"{name} {fields[name]}" for name in ("cpu family", "model") if name in fields])
