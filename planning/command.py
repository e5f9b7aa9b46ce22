"""`raylens plan`: its options and output."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raylens.planning.ceilings import Hardware, ceilings
from raylens.planning.costs import read_costs
from raylens.planning.load import LoadProfile, Slo
from raylens.planning.plan import MAX_UTILISATION, SearchOptions, make_plan, plan_for_gpus
from raylens.planning.report import as_json, as_text
from raylens.planning.settings import PlanError, read_mapping

HELP = """\
Find the replicas of each stage that a load needs, by simulating the pipeline with measured costs.

  raylens plan --costs stage-costs.json --rate 20 --answer-tokens 100 --ttft-p95-ms 500
  raylens plan --costs stage-costs.json --rate 20 --picture-share 0.5 --megapixels 0.8 2.1 --repeated-share 0.3
  raylens plan --costs stage-costs.json --load load.yaml --tpot-p95-ms 50 --json
  raylens plan --costs stage-costs.json --rate 5 --cores 4       does one machine of 4 cores suffice?

`python -m benchmarks.stage_costs --output FILE` measures the costs of the machine that runs it. --cost replaces a
measured figure by an assumption, and the report lists it. The next example finds the ceiling of a fleet of 1,000 GPUs
whose steps take 20 ms:

  raylens plan --costs stage-costs.json --rate 100 --gpus 1000 \\
      --cost generate.reserved.gpus=1 --cost generate.seconds_per_step=0.02

Equal arguments give equal plans. docs/planning.md describes the simulation, its limits and its accuracy.
"""
_QUIET_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("--costs", type=Path, required=True, metavar="FILE", help="measured costs, by benchmarks.stage_costs")
    add("--load", type=Path, metavar="FILE", help="YAML or JSON file of the load; options override it")
    add("--rate", dest="requests_per_second", type=float, metavar="N", help="requests per second, Poisson arrivals")
    add("--picture-share", type=float, metavar="X", help="share of requests with pictures (default: 0)")
    add("--megapixels", type=float, nargs="+", metavar="N", help="size of each picture of such a request (default: 1)")
    add("--repeated-share", type=float, metavar="X", help="share of pictures with cached embeddings (default: 0)")
    add("--prompt-tokens", type=int, metavar="N", help="text tokens of a prompt (default: 100)")
    add("--answer-tokens", type=int, metavar="N", help="tokens of an answer (default: 100)")
    add("--lengths", choices=("fixed", "geometric"), help="all lengths equal (default), or geometric with these means")
    add("--ttft-p95-ms", type=float, metavar="MS", help="SLO: time to first token, 95th percentile")
    add("--tpot-p95-ms", type=float, metavar="MS", help="SLO: time per output token, 95th percentile")
    most = "of any stage (default: %(default)s)"
    add("--max-utilisation", type=float, default=MAX_UTILISATION, metavar="X", help=most)
    add("--cost", action="append", default=[], metavar="NAME=VALUE", help="replaces a measured figure")
    add("--cores", type=int, metavar="N", help="all stages share a machine of N cores (default: a core per thread)")
    add("--gpus", type=int, metavar="N", help="scale the load to N GPUs, and show ceilings")
    for name, field in Hardware.model_fields.items():
        kind = int if field.annotation is int else float
        text = f"{field.description} (default: {field.default:g})"
        add(f"--{name.replace('_', '-')}", type=kind, default=field.default, metavar="N", help=text)
    add("--ceilings", action="store_true", help="show the next limits of a larger fleet, also without --gpus")
    add("--seed", type=int, default=0, help="of the arrivals (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Prints the plan and returns 0. Raises PlanError for invalid input."""
    assumed = _assumed(args.cost)
    costs = read_costs(args.costs, assumed)
    load, slo = _load(args), _slo(args)
    hardware = Hardware.checked({name: getattr(args, name) for name in Hardware.model_fields}, "options")
    options = SearchOptions(args.cores, args.max_utilisation, args.seed, _progress())
    if args.gpus is not None and args.cores is not None:
        raise PlanError(f"cores: must not be given with --gpus, which is about many machines, not {args.cores}")
    if args.gpus is None:
        plan = make_plan(costs, load, slo, options)
    else:
        plan = plan_for_gpus(costs, load, slo, args.gpus, options)
    limits = ceilings(plan, costs, hardware) if args.ceilings or args.gpus is not None else []
    print(json.dumps(as_json(plan, costs, limits, assumed)) if args.json else as_text(plan, costs, limits, assumed))
    return 0


def _load(args: argparse.Namespace) -> LoadProfile:
    values = {} if args.load is None else read_mapping(args.load)
    options = vars(args)
    values |= {name: options[name] for name in LoadProfile.model_fields if options[name] is not None}
    if "requests_per_second" not in values:
        raise PlanError("load: requests_per_second: must be given, by --rate or in the file of --load")
    return LoadProfile.checked(values, "load" if args.load is None else str(args.load))


def _slo(args: argparse.Namespace) -> Slo:
    milliseconds = {"ttft_p95_seconds": args.ttft_p95_ms, "tpot_p95_seconds": args.tpot_p95_ms}
    return Slo.checked({name: value / 1e3 for name, value in milliseconds.items() if value is not None}, "SLO")


def _assumed(overrides: list[str]) -> dict[str, float]:
    assumed = {}
    for override in overrides:
        name, _, value = override.partition("=")
        try:
            assumed[name] = float(value)
        except ValueError as error:
            raise PlanError(f"--cost {override}: must be NAME=VALUE with a number as the value") from error
    return assumed


def _progress() -> Callable[[str], None]:
    """Returns a function that reports each simulation, once planning takes longer than _QUIET_SECONDS."""
    started = time.monotonic()

    def say(line: str) -> None:
        if (seconds := time.monotonic() - started) > _QUIET_SECONDS:
            print(f"{seconds:.0f} s: simulated {line}", file=sys.stderr, flush=True)

    return say
