"""Tries and measures everything on a GPU in nine minutes, by what is learned per second.

    python -m benchmarks.gpu_day [--minutes 9] [--from PART | --parts NAME ...] [--output FILE]

Each part is a process with its own time limit: a part that crashes or hangs affects no other, and the table shows its
error and the end of its output.

- smoke-language, smoke-vision: a LLaVA of 0.5 B decodes, prefills and encodes: recorded, replayed, equal or not
- parity: greedy answers of three families equal those of `generate`, on the card
- decode: the decode engine with 1, 8, 64 and 256 sequences, against the bandwidth of a copy on this card
- prefill: a long prompt, against the rate of a large matrix product on this card
- tower: two vision towers, against the same rate
- pipeline-llava: the whole application on the card, TTFT and ITL beside pictures, with Encode and Generate sharing the
  card and with the encoder inline; needs Ray
- profile: the time of a step by kernels, launches and host work
- tests: the tests marked `gpu`, family by family, as many as the time allows
- pipeline-qwen2_5_vl: like pipeline-llava

Checkpoints have random weights, made on the GPU. Decode, prefill and profile use the language half of a 7B LLaVA. The
pipelines' models are as wide, with a quarter of the layers, as the document states. The results go into results/<name
of the GPU>.json beside this file, or into --output, as they come: a run that is killed keeps what it had. Results of
other parts stay in that file, so that `--from` goes on where an earlier run ended. With `--device cpu --tiny`, every
part runs on the CPU with tiny shapes. This tests the program; the figures mean nothing, and it writes a file only with
--output. Without a file, the last line is the document.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.document import save
from benchmarks.parts import TREE, Document, Outcome, Part, run_part

PARITY_FAMILIES = ("llava", "qwen2_5_vl", "gemma3")
PARTS = (
    Part("smoke-language", ("-m", "benchmarks.gpu_smoke", "language"), 90),
    Part("smoke-vision", ("-m", "benchmarks.gpu_smoke", "vision"), 40),
    Part("parity", ("-m", "benchmarks.gpu_tests", "--families", *PARITY_FAMILIES), 90),
    Part("decode", ("-m", "benchmarks.llm_cuda", "decode"), 120),
    Part("prefill", ("-m", "benchmarks.llm_cuda", "prefill"), 60),
    Part("tower", ("-m", "benchmarks.encoder_cuda"), 60),
    Part("pipeline-llava", ("-m", "benchmarks.gpu_pipeline", "llava"), 180, needs=("ray",)),
    Part("profile", ("-m", "benchmarks.step_profile"), 60),
    Part("tests", ("-m", "benchmarks.gpu_tests"), 450),
    Part("pipeline-qwen2_5_vl", ("-m", "benchmarks.gpu_pipeline", "qwen2_5_vl"), 180, needs=("ray",)),
)
RESULTS = Path(__file__).parent / "results"
_DEVICE_NAME = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
"""In a separate process, so that this one takes no GPU memory."""
_WIDTH = 22


def chosen_parts(names: list[str] | None, first: str, device: str, *, tiny: bool) -> list[Part]:
    """Returns the selected parts, those from `first` on without a selection, with their arguments for the device, in
    the order of PARTS."""
    options = ("--device", device, *(("--tiny",) if tiny else ()))
    order = [part.name for part in PARTS]
    return [
        Part(part.name, (*part.arguments, *options), part.seconds, part.needs)
        for part in PARTS
        if (part.name in names if names is not None else order.index(part.name) >= order.index(first))
    ]


def run_all(parts: list[Part], seconds: float, document: Document, output: Path | None) -> dict[str, Outcome]:
    """Runs one part after the other until the time is up. Writes the document whenever a part has something new."""
    deadline = time.monotonic() + seconds
    outcomes: dict[str, Outcome] = {}
    for part in parts:
        left = deadline - time.monotonic()
        print(f"{part.name} ...", flush=True)
        if left > 0:
            outcomes[part.name] = run_noted(part, left, document, output)
        else:  # the file keeps an earlier result
            outcomes[part.name] = Outcome("skipped", reason="no time is left")
    return outcomes


def run_noted(part: Part, seconds: float, document: Document, output: Path | None) -> Outcome:
    def note(outcome: Outcome) -> None:
        document["parts"][part.name] = {"at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", **outcome.shown()}
        save(document, output)

    outcome = run_part(part, seconds, lambda own: note(Outcome("running", document=own)))
    note(outcome)
    return outcome


def table(outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Yields the table's lines: each part's result, figures, and failure."""
    for name, outcome in outcomes.items():
        yield f"{name:<{_WIDTH}}{outcome.state:<10}{outcome.seconds:>7.1f} s  {outcome.reason}".rstrip()
        for measured, figures in outcome.document.get("measured", {}).items():
            yield from rows(measured, figures)
        yield from (f"  | {line}" for line in outcome.last_lines)


def rows(name: str, figures: Any) -> Iterator[str]:
    """Yields a line of plain figures, and one for each entry of a list."""
    if not isinstance(figures, dict):
        yield f"  {name:<{_WIDTH - 2}}{figures}"
        return
    lists = {key: value for key, value in figures.items() if isinstance(value, list)}
    plain = [f"{key} {value}" for key, value in figures.items() if key not in lists]
    yield f"  {name:<{_WIDTH - 2}}{'  '.join(plain)}"
    for entries in lists.values():
        yield from ("    " + "  ".join(str(value) for value in entry.values()) for entry in entries)


def device_name(device: str) -> str:
    """Returns the name of the device, "" if PyTorch sees no GPU."""
    if device == "cpu":
        return "cpu"
    asked = subprocess.run([sys.executable, "-c", _DEVICE_NAME], capture_output=True, text=True, cwd=TREE, check=False)
    return asked.stdout.strip()


def file_name(device: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", device) + ".json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--from", dest="first", metavar="PART", choices=names, default=names[0], help="all from this one on"
    )
    chosen.add_argument("--parts", nargs="+", metavar="PART", choices=names, help=f"of {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: tries the program, measures nothing")
    parser.add_argument("--output", type=Path, help="where the document goes")
    options = parser.parse_args()
    name = device_name(options.device)
    if not name:
        parser.exit(1, "benchmarks.gpu_day needs a CUDA GPU, and PyTorch sees none\n")
    output = options.output or (None if options.tiny or name == "cpu" else RESULTS / file_name(name))
    known = json.loads(output.read_text()) if output is not None and output.exists() else {}
    document: Document = {"device": name, "parts": known.get("parts", {})}
    outcomes = run_all(
        chosen_parts(options.parts, options.first, options.device, tiny=options.tiny),
        options.minutes * 60,
        document,
        output,
    )
    print("\n".join(table(outcomes)))
    if output is None:
        print(json.dumps(document))
    return 0 if all(outcome.state in ("ok", "skipped") for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
