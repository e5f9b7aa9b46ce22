"""Measures the cost of each stage through a server, as input of `raylens plan`.

    python -m benchmarks.stage_costs [--rounds 3] [--output FILE]

It serves the bundled model on this machine. One client sends sequential requests: texts of two lengths, new pictures of
three sizes, repeated pictures, and answers of one token and of 64. Then 2, 4, 8 and 16 concurrent streams run. In each
of these phases, the benchmark reads the CPU time of every process, less the time of the idle process.

A process's time in a phase is a linear model: a cost per request, per new or repeated picture, per megapixel, per
message and per piece of an answer. Non-negative least squares over all phases give these costs. Decoding, processing
and encoding of pictures are the times in the answers (docs/metrics.md).

The share of a process's work that delays a first token is not visible from outside. The TTFT of an isolated request
determines it: the simulation must give the same (`planning/calibration.py`). The client rests before such a request,
like that of `benchmarks.first_token`, because a server that has just answered answers sooner. An encoder batch is
measured with one picture only, so the plan expects no gain from batches: two pictures cost twice as much.

The client's CPU time is measured as well. `others` are cores used by all other programs of the machine during a phase.
The round of a phase with the lowest `others` counts. The last line is one JSON document; its `costs` are the input of
`raylens plan --costs`.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.document import make_parser, publish, this_machine
from benchmarks.served_model import (
    MODEL,
    ROLES,
    SETTINGS,
    Seconds,
    ServedModel,
    megapixels,
    question,
    sending,
    served_bundled_model,
)
from benchmarks.streaming_client import Answer, send_all
from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.cluster.haproxy import MAX_CONNECTIONS
from raylens.deployments.config import AppConfig
from raylens.deployments.stages.process_setup import PREPROCESS_NICENESS
from raylens.llm.config import EngineConfig
from raylens.planning.calibration import Alone, calibrated
from raylens.planning.costs import Costs

ASKED = 16
"""Requests of a phase in a round."""
STREAMS = {2: 192, 4: 192, 8: 160, 16: 128}
"""Tokens per answer, by the number of concurrent streams."""
IDLE_SECONDS = 4.0
REST_SECONDS = 0.03
RESTED = "rested: "
"""Name prefix of phases whose client rests before each request, like that of `benchmarks.first_token`."""
FEATURES = ("request", "new_picture", "repeated_picture", "megapixel", "message", "piece")


@dataclass(frozen=True)
class Phase:
    """The requests of a phase, and their CPU time per request."""

    name: str
    answers: list[Answer]
    cpu: Seconds
    seconds: float
    num_streams: int = 1
    new_pictures: int = 0
    repeated_pictures: int = 0
    megapixels: float = 0.0

    @property
    def features(self) -> list[float]:
        pieces = statistics.mean(len(answer.times) for answer in self.answers)
        pictures = [float(self.new_pictures), float(self.repeated_pictures), self.megapixels]
        return [1.0, *pictures, pieces / self.num_streams, pieces]

    def median(self, stage: str) -> float:
        """Returns the median of a stage's time, in seconds."""
        seconds: float = statistics.median(answer.timings["seconds"][stage] for answer in self.answers)
        return seconds

    @property
    def ttft(self) -> float:
        return statistics.median(answer.ttft for answer in self.answers)

    @property
    def others(self) -> float:
        return max(0.0, self.cpu["machine"] - sum(self.cpu[role] for role in ROLES)) / self.seconds


class Meter:
    """Runs phases on a server, and subtracts the idle server's CPU time."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        began, before = time.perf_counter(), served.cpu()
        time.sleep(IDLE_SECONDS)
        after, seconds = served.cpu(), time.perf_counter() - began
        self.idle = {role: (after[role] - before[role]) / seconds for role in ROLES}
        """Cores of each role."""

    def one_by_one(
        self, name: str, pictures: Sequence[tuple[float, int | None]], words: int, tokens: int, *, rest: float = 0.0
    ) -> Phase:
        contents = [question(pictures, words) for _ in range(ASKED)]

        def ask_all() -> tuple[list[Answer], float]:
            answers, total_cpu = [], 0.0
            for content in contents:
                time.sleep(rest)
                answer, cpu = self._served.ask(content, tokens)
                answers.append(answer)
                total_cpu += cpu
            return answers, total_cpu

        return self._phase(
            name,
            ask_all,
            new_pictures=sum(number is None for _, number in pictures),
            repeated_pictures=sum(number is not None for _, number in pictures),
            megapixels=sum(megapixels(size) for size, _ in pictures),
        )

    def at_once(self, num_streams: int, tokens: int) -> Phase:
        sendings = [sending(0.0, question([]), tokens) for _ in range(num_streams)]
        act = partial(send_all, self._served.url, sendings)
        return self._phase(f"{num_streams} streams", act, num_streams=num_streams)

    def _phase(self, name: str, act: Callable[[], tuple[list[Answer], float]], **counts: Any) -> Phase:
        began, before = time.perf_counter(), self._served.cpu()
        answers, client = act()
        after, seconds = self._served.cpu(), time.perf_counter() - began
        used = {role: max(0.0, after[role] - before[role] - self.idle[role] * seconds) for role in ROLES}
        used |= {"client": client, "machine": after["machine"] - before["machine"] - sum(self.idle.values()) * seconds}
        per_request = {role: value / len(answers) for role, value in used.items()}
        return Phase(name, answers, per_request, seconds / len(answers), **counts)


def run_phases(meter: Meter) -> list[Phase]:
    busy: dict[str, tuple[list[tuple[float, int | None]], int, int]] = {
        "text": ([], 6, 1),
        "long text": ([], 60, 1),
        "text, 64 tokens": ([], 6, 64),
        **{f"new picture, {size}": ([(size, None)], 6, 1) for size in (0.3, 0.8, 2.1)},
        **{f"repeated picture, {size}": ([(size, 1)], 6, 1) for size in (0.3, 0.8)},
    }
    rested = ("text", "text, 64 tokens", "new picture, 0.8", "repeated picture, 0.8")
    return [
        *(meter.one_by_one(name, *asked) for name, asked in busy.items()),
        *(meter.one_by_one(f"{RESTED}{name}", *busy[name], rest=REST_SECONDS) for name in rested),
        *(meter.at_once(count, tokens) for count, tokens in STREAMS.items()),
    ]


def quietest(rounds: list[list[Phase]]) -> dict[str, Phase]:
    """Returns each phase from the round with the least use by other programs."""
    return {own[0].name: min(own, key=lambda phase: phase.others) for own in zip(*rounds, strict=True)}


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Returns non-negative factors. While a factor is negative, the most negative one becomes zero and the others are
    fitted again. Rows are weighted by their values, so that relative errors count equally."""
    scale = np.maximum(np.asarray(values), 0.02 * max(*values, 1e-9))
    matrix, target = np.asarray(rows) / scale[:, None], np.asarray(values) / scale
    used = [column for column in range(matrix.shape[1]) if matrix[:, column].any()]
    factors = np.zeros(matrix.shape[1])
    while used:
        found = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
        if found.min() >= 0:
            factors[used] = found
            break
        del used[int(found.argmin())]
    return [float(factor) for factor in factors]


def work_of(phases: dict[str, Phase], role: str, computing: dict[str, float]) -> dict[str, float]:
    """Returns the `Work` of a role. `computing`: seconds of each phase to exclude."""
    own = list(phases.values())
    values = [max(0.0, phase.cpu[role] - computing.get(phase.name, 0.0)) for phase in own]
    factors = least_squares([phase.features for phase in own], values)
    return {f"seconds_per_{name}": round(factor, 8) for name, factor in zip(FEATURES, factors, strict=True)}


def engine_costs(phases: dict[str, Phase]) -> dict[str, float]:
    """Returns the costs of a step, from the CPU time of the engine's thread. In a small model, the fixed part is Python
    time (docs/decoding.md: 0.4 ms), which blocks the replica's other thread."""
    rows, values = [], []
    budget = served_engine().max_num_batched_tokens
    for phase in phases.values():
        answer = phase.answers[0]
        decoded = answer.num_tokens - 1
        lacking = _lacking(phase)
        rows.append([-(-lacking // budget) + decoded / phase.num_streams, decoded, lacking])
        values.append(phase.cpu["engine"])
    step, sequence, token = least_squares(rows, values)
    return {
        "seconds_per_step": step,
        "seconds_per_sequence": sequence,
        "seconds_per_prompt_token": token,
        "interpreter_seconds_per_step": step,
    }


def served_engine() -> EngineConfig:
    """Returns the settings of Generate's engine, on the CPU."""
    return EngineConfig(MODEL, **asdict(AppConfig.model_validate(SETTINGS).generate.engine))


def _lacking(phase: Phase) -> float:
    """Returns the number of prompt tokens that the engine computes. A repeated picture's whole prompt counts, although
    prompts of one phase share their prefix: the plan assumes no prefix cache."""
    return statistics.median(answer.prompt_tokens for answer in phase.answers)


def costs_of(phases: dict[str, Phase], idle: Seconds) -> Costs:
    """Returns the costs: from the phases of a busy server, and the TTFT of a rested one."""
    alone = alone_of(phases)
    phases = {name: phase for name, phase in phases.items() if not name.startswith(RESTED)}
    pictures = {name: phase for name, phase in phases.items() if phase.new_pictures}
    computing = {name: phase.median("media_decode") + phase.median("processor") for name, phase in pictures.items()}
    encoding = {name: phase.median("encode") for name, phase in pictures.items()}
    item, per_megapixel = least_squares(
        [[1.0, phase.megapixels] for phase in pictures.values()], list(computing.values())
    )
    model = model_sizes(phases)
    encode_seconds = statistics.median(encoding.values())
    config = AppConfig.model_validate(SETTINGS)
    engine = served_engine()
    cpus = {name: getattr(config, name).num_cpus for name in ("ingress", "shared", "preprocess", "encode", "generate")}
    computed = {"preprocess": computing, "encode": encoding}
    stages: dict[str, dict[str, Any]] = {
        name: {"reserved": {"cpus": own}, "work": work_of(phases, name, computed.get(name, {}))}
        for name, own in {"proxy": 0, **cpus}.items()
    }
    stages["preprocess"] |= {"seconds_per_item": item, "seconds_per_megapixel": per_megapixel}
    stages["preprocess"] |= {"niceness": PREPROCESS_NICENESS}
    stages["encode"] |= {"seconds_per_batch": 0.0, "seconds_per_patch": encode_seconds / model["patches_per_picture"]}
    limits = {name: getattr(engine, name) for name in ("max_num_seqs", "max_num_batched_tokens", "max_decode_slowdown")}
    stages["generate"] |= engine_costs(phases) | limits
    raw = {
        "version": 1,
        "measured_on": this_machine(settings=SETTINGS),
        "model": model,
        "client": work_of(phases, "client", {}),
        **stages,
        "beside": work_of(phases, "beside", {}),
        "background_cores": round(sum(idle.values()), 4),
        "fleet": fleet_costs(phases, idle),
    }
    return calibrated(Costs.checked(raw, "measured costs"), alone, cores=this_machine()["cpus"])


def alone_of(phases: dict[str, Phase]) -> Alone:
    """Returns the figures of an isolated request to a rested server."""
    stream = phases[f"{RESTED}text, 64 tokens"]
    text, picture = phases[f"{RESTED}text"], phases[f"{RESTED}new picture, 0.8"]
    return Alone(
        text_tokens=round(_lacking(text)),
        megapixels=picture.megapixels,
        ttft_text=text.ttft,
        ttft_new_picture=picture.ttft,
        ttft_repeated_picture=phases[f"{RESTED}repeated picture, 0.8"].ttft,
        answer_tokens=64,
        tpot=statistics.median(answer.tpot for answer in stream.answers),
    )


def model_sizes(phases: dict[str, Phase]) -> dict[str, Any]:
    """Returns a picture's sizes in the bundled model, a LLaVA with one token per patch."""
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    tokens = _lacking(phases["new picture, 0.8"]) - _lacking(phases["text"])
    return {
        "name": MODEL,
        "patches_per_picture": tokens,
        "tokens_per_picture": tokens,
        "bytes_per_embedding": 4 * config["text_config"]["hidden_size"],
        "pixel_bytes_per_patch": 4 * 3 * config["vision_config"]["patch_size"] ** 2,
    }


def fleet_costs(phases: dict[str, Phase], idle: Seconds) -> dict[str, float]:
    """Returns the fleet figures that one machine can measure. The idle controller's whole work is attributed to its
    five replicas."""
    streams = phases[f"{max(STREAMS)} streams"]
    picture = phases["new picture, 2.1"]
    body = len(sending(0.0, question([(2.1, None)]), 1).body)
    return {
        "controller_seconds_per_replica_second": idle["controller"] / 5,
        "proxy_bytes_per_piece": statistics.mean(answer.num_bytes / len(answer.times) for answer in streams.answers),
        "proxy_bytes_per_megapixel": body / picture.megapixels,
        "proxy_connections": MAX_CONNECTIONS,
    }


def measure(served: ServedModel, rounds: int) -> tuple[Costs, dict[str, Phase]]:
    """Returns the costs and their phases. The first round warms up."""
    meter = Meter(served)
    phases = quietest([run_phases(meter) for _ in range(rounds + 1)][1:])
    return costs_of(phases, meter.idle), phases


def shown(phases: dict[str, Phase]) -> dict[str, dict[str, float]]:
    """Returns the figures of each phase: its TTFT, and the CPU time of each role per request, in ms."""
    figures = {}
    for name, phase in phases.items():
        cpu = {f"{role}_ms": round(phase.cpu[role] * 1e3, 3) for role in ROLES}
        figures[name] = {"ttft_ms_p50": round(phase.ttft * 1e3, 2), **cpu, "others": round(phase.others, 3)}
        if phase.answers[0].num_tokens > 1:
            tpot = statistics.median(answer.tpot for answer in phase.answers)
            figures[name]["tpot_ms_p50"] = round(tpot * 1e3, 3)
    return figures


def main() -> None:
    options = make_parser(__doc__, rounds=3).parse_args()
    with served_bundled_model() as served:
        costs, phases = measure(served, options.rounds)
    for name, figures in shown(phases).items():
        print(f"{name}: {figures}")
    publish({"costs": costs.model_dump(), "phases": shown(phases), "machine": this_machine()}, options.output)


if __name__ == "__main__":
    main()
