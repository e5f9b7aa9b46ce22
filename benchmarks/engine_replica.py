"""Runs a replica of Generate, with an engine that only waits, for `benchmarks.engine_thread`.

    PYTHONPATH=TREE python -P benchmarks/engine_replica.py

It serves the Generate of TREE, outside of Ray, on the event loop that Ray gives a replica. Each line of its input is a
JSON object of the fields of `Asked`, and each line of its output one of the fields of `Measured`. The answers go to a
process of its own, which reads them as an ingress would, and proves that every answer has come whole and in order.
"""

# ruff: noqa: E402
import asyncio
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice, pairwise
from multiprocessing.connection import Connection
from typing import Any

from raylens.modeling.torchvision_build import make_importable

make_importable()  # before transformers is imported

import torch
from ray._private.async_compat import get_new_event_loop
from transformers import AutoTokenizer

from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig
from raylens.deployments.replica_start import Spans  # type: ignore[attr-defined]  # where older trees have it, too
from raylens.deployments.request_context import NO_REQUEST
from raylens.deployments.stages import generate_stage as stage
from raylens.deployments.wire.piece_connection import PieceAddress
from raylens.deployments.wire.piece_messages import read_message, unpack_piece
from raylens.deployments.wire.private_port import PortAddress, PrivatePort, Reader, Writer, frame, read_frame
from raylens.llm import engine as llm_engine
from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.detokenizer import Detokenizer, decoder_of
from raylens.llm.outputs import RequestOutput
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sequence import FinishReason, SequenceTimes
from raylens.preprocess.schema import ProcessedPrompt

TEXT = "The engine's thread asks for the interpreter after each launch, and the event loop has it. "
NUM_LAUNCHES = 10
_WARM_STEPS = 30


@dataclass(frozen=True, slots=True)
class Asked:
    """`wait_s`: how long each step waits without the interpreter, divided among `num_waits` equal waits. `is_alone`:
    the step's outputs are made, and nobody gets them. `switch_interval`: of the interpreter, in seconds; None: what
    the replica has set itself."""

    num_streams: int
    num_steps: int
    wait_s: float
    num_waits: int
    is_alone: bool
    switch_interval: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """`cycles_ms`: from the beginning of each step to that of the next. `loop_us`: processor time of the event loop's
    thread for each token, in microseconds. `tokens_per_piece`: more than 1 where the loop falls behind."""

    cycles_ms: list[float]
    loop_us: float
    tokens_per_piece: float
    tokens_per_message: float


class WaitingEngine:
    """Stands for an LLMEngine on a GPU: its step launches operations of torch and waits without the interpreter. Each
    stream gets one token a step. All streams end together, when as many steps have been measured as were asked for."""

    def __init__(self, config: Any) -> None:
        tokenizer = AutoTokenizer.from_pretrained(config.model, revision=config.revision)
        self._decode = decoder_of(tokenizer)
        self.byte_tokenizer = ByteTokenizer(tokenizer, len(tokenizer), frozenset())
        self.token_ids: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        self._rows = torch.zeros(64, 64)
        self._streams: dict[str, RequestOutput] = {}
        self._asked: Asked | None = None
        self._starts: list[float] = []
        self._loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        self.loop_seconds: list[float] = []

    def begin(self, asked: Asked) -> None:
        self._starts, self.loop_seconds = [], []
        self._asked = asked

    def call_when_adapter_read(self, wake: Any) -> None:
        """No adapters are read."""

    def make_detokenizer(self, params: SamplingParams, prompt: ProcessedPrompt) -> Detokenizer:
        return Detokenizer(self._decode, params.stop)

    def add_request(self, request_id: str, *_: Any, **__: Any) -> None:
        times = SequenceTimes()
        times.first_scheduled = time.perf_counter()
        self._streams[request_id] = RequestOutput(request_id, 0, [], (), (), 8, 0, 0, None, False, times)

    stage_embeddings = None
    """There are none."""

    def set_embeddings(self, request_id: str, index: int, embeddings: torch.Tensor) -> None:
        raise AssertionError("the prompts have no items")

    def abort(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    @property
    def is_idle(self) -> bool:
        return self._asked is None or not (self._asked.is_alone or self._streams)

    @property
    def cycles_ms(self) -> list[float]:
        return [(end - start) * 1e3 for start, end in pairwise(self._starts[_WARM_STEPS:])]

    def step(self) -> Sequence[RequestOutput]:
        assert self._asked is not None
        asked = self._asked
        if asked.is_alone or len(self._streams) == asked.num_streams:
            self._starts.append(time.perf_counter())
            if len(self._starts) == _WARM_STEPS + 1:
                self.loop_seconds.append(time.clock_gettime(self._loop_clock))
        is_last = len(self._starts) == _WARM_STEPS + asked.num_steps + 1
        self._launch(asked)
        if asked.is_alone and not self._streams:
            self._streams = {str(number): _alone(str(number)) for number in range(asked.num_streams)}
        outputs = [self._output(stream, is_last) for stream in self._streams.values()]
        if is_last:
            self.loop_seconds.append(time.clock_gettime(self._loop_clock))
            self._streams, self._asked = {}, None
        return [] if asked.is_alone else outputs

    def _launch(self, asked: Asked) -> None:
        launches_of_wait = NUM_LAUNCHES // asked.num_waits
        for number in range(1, NUM_LAUNCHES + 1):
            torch.add(self._rows, 1, out=self._rows)
            if number % launches_of_wait == 0:
                time.sleep(asked.wait_s / asked.num_waits)

    def _output(self, stream: RequestOutput, is_last: bool) -> RequestOutput:
        stream.num_output_tokens += 1
        stream.times.note_token()
        number = stream.num_output_tokens
        token_id = self.token_ids[(number - 1) % len(self.token_ids)]
        finish_reason = FinishReason.LENGTH if is_last else None
        return RequestOutput(stream.request_id, 0, [token_id], (), (), 8, 0, number, finish_reason, False, stream.times)


def _alone(request_id: str) -> RequestOutput:
    return RequestOutput(request_id, 0, [], (), (), 8, 0, 0, None, False, SequenceTimes())


def read_answers(pipe: Connection) -> None:
    """Runs in a process of its own. Tells the address of its port, then the messages of each answer that came whole."""
    asyncio.run(_read_answers(pipe))


async def _read_answers(pipe: Connection) -> None:
    bodies: list[bytes] = []

    async def receive(reader: Reader, _: Writer) -> None:
        while True:
            bodies.append(await read_frame(reader))  # unpacked later: here are few cores

    port = PrivatePort(receive)
    await port.open()
    pipe.send(port.address)
    while await asyncio.to_thread(pipe.recv):
        await asyncio.sleep(0.1)  # the last message
        pipe.send(await _counts(bodies))
        bodies.clear()
    await port.close()


async def _counts(bodies: list[bytes]) -> tuple[int, int, dict[int, tuple[list[int], str]]]:
    """Returns how many messages and pieces came, and the tokens and the text of each call."""
    reader, num_pieces = asyncio.StreamReader(), 0
    answers: dict[int, tuple[list[int], str]] = {}
    for body in bodies:
        reader.feed_data(frame(body))
        for number, packed, _ in await read_message(reader):
            pieces = list(map(unpack_piece, packed))
            num_pieces += len(pieces)
            for piece in pieces:
                token_ids, text = answers.setdefault(number, ([], ""))
                answers[number] = (token_ids + piece.token_ids, text + piece.text)
    return len(bodies), num_pieces, answers


class Replica:
    """Generate with a WaitingEngine. Make it on the event loop."""

    def __init__(self, address: PortAddress, pipe: Connection) -> None:
        self._address, self._pipe = address, pipe
        llm_engine.LLMEngine = WaitingEngine  # type: ignore[misc, assignment]
        stage.start_replica = lambda *_: Spans()  # type: ignore[attr-defined]
        self._generate = stage.Generate(AppConfig(model=str(BUNDLED_MODEL)))
        engine: Any = self._generate._engine
        self._engine: WaitingEngine = engine
        self._own_interval = sys.getswitchinterval()

    async def measure(self, asked: Asked) -> Measured:
        sys.setswitchinterval(asked.switch_interval or self._own_interval)
        self._engine.begin(asked)
        if asked.is_alone:
            self._generate._loop.wake()
            while not self._engine.is_idle:
                await asyncio.sleep(0.1)
            return Measured(self._engine.cycles_ms, 0.0, 1.0, 1.0)
        await asyncio.gather(*(self._answer(number) for number in range(asked.num_streams)))
        self._pipe.send(True)
        num_messages, num_pieces, answers = await asyncio.to_thread(self._pipe.recv)
        self._check(asked, answers)
        num_tokens = sum(len(token_ids) for token_ids, _ in answers.values())
        start, end = self._engine.loop_seconds
        loop_us = (end - start) / asked.num_steps / asked.num_streams * 1e6
        return Measured(self._engine.cycles_ms, loop_us, num_tokens / num_pieces, num_tokens / num_messages)

    async def _answer(self, number: int) -> None:
        prompt = ProcessedPrompt(self._engine.token_ids[:8], [], [])
        address = PieceAddress(self._address, number)
        await self._generate.generate(
            str(number), prompt, SamplingParams(), [], address, NO_REQUEST, cache_salt="", priority=0
        )

    def _check(self, asked: Asked, answers: dict[int, tuple[list[int], str]]) -> None:
        assert answers.keys() == set(range(asked.num_streams)), "an answer is missing"
        for token_ids, text in answers.values():
            assert len(token_ids) > asked.num_steps, "tokens are missing"
            assert token_ids == list(islice(cycle(self._engine.token_ids), len(token_ids))), "tokens are out of order"
            assert text == self._engine._decode(token_ids), "the text differs"


async def serve() -> None:
    own, its = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    reader = context.Process(target=read_answers, args=(its,), daemon=True)
    reader.start()
    replica = Replica(await asyncio.to_thread(own.recv), own)
    while line := await asyncio.to_thread(sys.stdin.readline):
        measured = await replica.measure(Asked(**json.loads(line)))
        print(json.dumps(asdict(measured)), flush=True)
    own.send(False)
    reader.join()


if __name__ == "__main__":
    loop = get_new_event_loop()
    loop.run_until_complete(serve())
