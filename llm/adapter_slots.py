"""Keeps adapters in memory: loads the adapters of waiting sequences and drops unused ones."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from raylens.llm.lora.adapter import check_adapter, read_adapter
from raylens.llm.lora.layers import LoraLayers
from raylens.llm.lora.request import LoraError, LoraRequest
from raylens.llm.sequence import Sequence

logger = logging.getLogger(__name__)


class LoraAdapters:
    """Gives adapters their slots, at most `max_loras` at once.

    A thread of its own reads adapters, one after another, while steps run. Sequences whose adapter is not in memory
    wait. If all slots are taken, `place` drops the least recently used adapter that no running and no earlier waiting
    sequence uses. If all are in use, it holds back new sequences of one busy adapter until its running ones have ended,
    because a busy adapter would never give up its slot otherwise."""

    def __init__(self, layers: LoraLayers, max_loras: int) -> None:
        self._layers = layers
        self._slots: OrderedDict[LoraRequest, int] = OrderedDict()  # least recently used first
        self._free = list(range(max_loras))
        self._loading: dict[LoraRequest, tuple[int, Future[None]]] = {}
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        self.on_read: Callable[[], None] = lambda: None
        """Called on another thread when `has_news` becomes true."""

    def check(self, folder: str) -> None:
        """Raises LoraError for an invalid adapter. Reads its settings and shapes, not its weights. Thread-safe."""
        check_adapter(folder, self._layers.shapes, max_rank=self._layers.max_rank)

    @property
    def has_news(self) -> bool:
        """Returns whether reading an adapter has succeeded or failed since the last `place`."""
        return any(future.done() for _, future in list(self._loading.values()))

    def place(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> dict[LoraRequest, LoraError]:
        """Sets `lora_slot` of the waiting sequences, given in scheduling order. Returns the adapters that could not be
        read, with the reasons. The caller ends their sequences; a later sequence tries again."""
        failures = self._collect()
        num_running = Counter(one.lora for one in running if one.lora is not None)
        for used in num_running:
            self._slots.move_to_end(used)
        wanted: set[LoraRequest] = set()
        held: set[LoraRequest] = set()
        for sequence in waiting:
            lora = sequence.lora
            if lora is None or lora in failures:
                continue
            if lora not in self._slots and lora not in self._loading and lora not in wanted:
                self._find_place(lora, num_running, wanted, held)
            wanted.add(lora)
            sequence.lora_slot = None if lora in held else self._slots.get(lora)
        return failures

    def _find_place(
        self, lora: LoraRequest, num_running: Counter[LoraRequest], wanted: set[LoraRequest], held: set[LoraRequest]
    ) -> None:
        """Starts to read the adapter into a free slot, or into the slot of an unused adapter. `wanted`: the adapters of
        earlier sequences. Without such a slot, adds to `held` a busy adapter whose new sequences must wait."""
        if not self._free:
            unused = next((one for one in self._slots if not num_running[one] and one not in wanted), None)
            if unused is None:
                if busy := [one for one in self._slots if num_running[one] and one not in held]:
                    held.add(min(busy, key=lambda one: num_running[one]))
                return
            self._free.append(self._slots.pop(unused))
        slot = self._free.pop()
        future = self._loader.submit(self._read, lora, slot)
        self._loading[lora] = slot, future
        future.add_done_callback(lambda _: self.on_read())

    @torch.inference_mode()
    def _read(self, lora: LoraRequest, slot: int) -> None:
        started = time.perf_counter()
        layers = self._layers
        layers.load(slot, read_adapter(lora.folder, layers.shapes, max_rank=layers.max_rank, dtype=layers.dtype))
        logger.info("adapter %s is in memory after %.2f s", lora.name, time.perf_counter() - started)

    def _collect(self) -> dict[LoraRequest, LoraError]:
        failures: dict[LoraRequest, LoraError] = {}
        for lora, (slot, future) in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[lora]
            error = future.exception()
            if error is None:
                self._slots[lora] = slot
                continue
            self._free.append(slot)
            is_known = isinstance(error, LoraError)
            logger.error("adapter %s in %s: %s", lora.name, lora.folder, error, exc_info=None if is_known else error)
            failures[lora] = LoraError(f"adapter {lora.name!r}: {error if is_known else 'it could not be loaded'}")
        return failures
