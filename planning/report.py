"""A plan as text and as a JSON document."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raylens.planning.ceilings import Ceiling
from raylens.planning.costs import Costs
from raylens.planning.plan import Plan


def as_text(plan: Plan, costs: Costs, limits: Sequence[Ceiling], assumed: Mapping[str, float]) -> str:
    """Returns the report: replicas, predicted times, any ceilings, and assumptions."""
    parts = [_replicas(plan), _predicted(plan), _ceilings(limits), _sources(plan, costs, assumed)]
    return "\n\n".join(part for part in parts if part)


def as_json(plan: Plan, costs: Costs, limits: Sequence[Ceiling], assumed: Mapping[str, float]) -> dict[str, Any]:
    """Returns the report as a JSON document; times in seconds."""
    outcome = plan.outcome
    return {
        "load": plan.load.model_dump(),
        "slo": plan.slo.model_dump(),
        "stages": [asdict(stage) for stage in plan.stages],
        "cpus": plan.cpus,
        "gpus": plan.gpus,
        "limiting_stage": plan.limiting_stage,
        "predicted": {
            "ttft_p50_seconds": outcome.ttft_p50,
            "ttft_p95_seconds": outcome.ttft_p95,
            "tpot_p50_seconds": outcome.tpot_p50,
            "tpot_p95_seconds": outcome.tpot_p95,
            "sequences_per_step": outcome.mean_batch,
        },
        "simulated_share_of_load": plan.cell,
        "simulations": plan.num_simulations,
        "ceilings": [asdict(ceiling) | {"utilisation": ceiling.utilisation} for ceiling in limits],
        "assumed": dict(assumed),
        "measured_on": costs.measured_on.model_dump(),
        "model": costs.model.name,
    }


def _table(*rows: Sequence[str]) -> str:
    """Returns aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _replicas(plan: Plan) -> str:
    rows = []
    for one in plan.stages:
        shares = [f"{one.utilisation:.0%}", f"{one.busy:.0%}"]
        rows.append([one.name.capitalize(), str(one.replicas), f"{one.cpus:g}", f"{one.gpus:g}", *shares])
    total = ["all", str(sum(stage.replicas for stage in plan.stages)), f"{plan.cpus:g}", f"{plan.gpus:g}", "", ""]
    return _table(["Stage", "replicas", "CPUs", "GPUs", "of capacity", "busy"], *rows, total)


def _predicted(plan: Plan) -> str:
    outcome, slo = plan.outcome, plan.slo
    times = [
        ("TTFT", outcome.ttft_p50, outcome.ttft_p95, slo.ttft_p95_seconds),
        ("TPOT", outcome.tpot_p50, outcome.tpot_p95, slo.tpot_p95_seconds),
    ]
    rows = [[name, *map(_ms, seconds)] for name, *seconds in times if seconds[0] is not None]
    load = f"{plan.load.requests_per_second:g} requests and {plan.load.tokens_per_second:.0f} tokens a second"
    return f"{load}; {plan.limiting_stage.capitalize()} limits\n" + _table(["", "p50", "p95", "SLO p95"], *rows)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _ceilings(limits: Sequence[Ceiling]) -> str:
    if not limits:
        return ""
    nearest = limits[0]
    rows = [
        [one.name, str(one.count), f"{one.used:.4g}", f"{one.limit:.4g} {one.unit}", f"{one.utilisation:.1%}"]
        for one in limits
    ]
    notes = [f"  {one.name}: {one.basis}. Raised by: {one.grows}." for one in limits]
    warning = " The fleet does not fit one cluster." if nearest.utilisation > 1 else ""
    verdict = f"The next ceiling: {nearest.name}, at {nearest.utilisation:.0%} of its limit.{warning}"
    return "\n".join([verdict, _table(["Ceiling", "number", "used of each", "limit", "share"], *rows), *notes])


def _sources(plan: Plan, costs: Costs, assumed: Mapping[str, float]) -> str:
    measured = costs.measured_on
    lines = [f"Costs measured with {costs.model.name} on {measured.processor}, {measured.cpus:g} cores."]
    if plan.cell < 1:
        lines.append(f"Simulated: {plan.cell:.2%} of the load, on the same share of the replicas.")
    lines += [f"Assumed, not measured: {name} = {value:g} (--cost)." for name, value in assumed.items()]
    cores = "each thread has its own core" if plan.cores is None else f"all stages share {plan.cores} cores"
    lines.append(f"Assumed: {cores}, and the KV cache has room.")
    return "\n".join(lines)
