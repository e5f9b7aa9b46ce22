"""One prompt of a client on its way through the stages: items, prompt, embeddings, answer.

Stages get references to each other's pending results. Only the items' metadata passes through this process. One event
wakes the request whenever one of its steps has news."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ray import ObjectRef
from ray.serve.handle import DeploymentResponse

from raylens.deployments.item_store.item_states import SharedItem
from raylens.deployments.pipeline.media_items import LoadedItem, all_or_none
from raylens.deployments.pipeline.piece_receiver import AnswerStream
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.routing.prompt_affinity import affinity_of
from raylens.deployments.stages.generate_job import GenerateJob
from raylens.deployments.stages.hand_over import ItemEmbeddings
from raylens.deployments.stages.stage_calls import CallFailedError, call_of, has_result
from raylens.deployments.wire.piece_connection import PieceAddress
from raylens.deployments.wire.stage_messages import GeneratedText, UnrenderedPrompt
from raylens.preprocess.schema import InvalidRequestError, ItemInfo, ProcessedPrompt, ProcessorIdentity

if TYPE_CHECKING:
    from raylens.deployments.pipeline.pipeline import Pipeline

_SETTLE_SECONDS = 0.5

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class _Item:
    """`stored`: None until Preprocess has processed the item and Encode has taken it. `is_pending`: its embeddings are
    not there yet."""

    loaded: LoadedItem
    stored: SharedItem | None = None
    is_pending: bool = True


class Request:
    """Leads one prompt through the stages. Call `next` for its answers' pieces and `aclose` at the end.

    A failure before the first piece is retried where that can help (`StageCalls.recover`); steps that succeeded keep
    their results."""

    def __init__(self, stages: "Pipeline", wanted: PipelineRequest, processor: ProcessorIdentity) -> None:
        self._wanted = wanted
        self._stages = stages
        self._processor = processor
        self._news = asyncio.Event()
        self._attempts = Counter[str]()
        self._pins = ExitStack()
        self._items: list[_Item] = []
        self._made: asyncio.Future[Any] | None = None
        """All items' embeddings."""
        self._prompt: asyncio.Task[ProcessedPrompt] | None = None
        self._prompt_ref: ObjectRef | None = None
        self._handed_over: list[PackedReference] = []
        self._answer: AnswerStream | None = None

    async def next(self) -> list[GeneratedText]:
        """Waits for the next pieces and returns them; none after the last. Raises InvalidRequestError for a mistake of
        the client, a StageError for a failure of the server."""
        if self._answer is None:
            self._answer = await self._begin()
        try:
            pieces = await self._answer.next()
        except BaseException:  # a context manager around each token costs
            self._fail()
        self._stages.calls.on_reply("generate")
        if self._made is not None and any(piece.finish_reason is not None for piece in pieces):
            # The shards may report an item later than Generate uses it. Its times would be missing.
            await asyncio.wait([self._made], timeout=_SETTLE_SECONDS)
        for piece in pieces:
            self._wanted.trace.times += piece.times
        return pieces

    def _fail(self) -> NoReturn:
        """Raises the current error of Generate as one of this application's."""
        try:
            with call_of("generate", Exception):
                raise
        except CallFailedError as failed:
            failed.raise_translated()

    async def aclose(self) -> None:
        """Cancels unfinished work and releases the items."""
        if self._answer is not None:
            self._answer.close()
        work = [one for one in (self._made, self._prompt) if one is not None]
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        self._pins.close()

    async def _begin(self) -> AnswerStream:
        """Returns the answer once its first pieces are ready."""
        self._order(await self._stages.media.load(self._wanted, self._processor))
        failed = None
        while True:
            try:
                if failed is not None:
                    await self._recover(failed)
                    failed = None
                return await self._lead()
            except CallFailedError as error:
                failed = error
            except InvalidRequestError as error:
                if error.item is None:
                    raise
                raise error.for_field(await self._field_of(error.item)) from error

    async def _lead(self) -> AnswerStream:
        """Takes each step whose result is missing, in the order of the diagram in docs/architecture.md."""
        await self._until(lambda: all(item.stored is not None for item in self._items))
        unrendered = self._unrendered()
        if unrendered is None and self._prompt is None:
            self._render()
        await self._until(lambda: unrendered is not None or self._prompt_ref is not None)
        with self._generate(unrendered) as answer:
            await self._until(lambda: answer.is_ready, answer)
            if self._prompt is not None:
                await self._prompt
            return answer

    async def _until(self, is_reached: Callable[[], bool], answer: AnswerStream | None = None) -> None:
        """Waits until `is_reached()`. Raises the failure of any step at once."""
        while not is_reached():
            if self._made is not None and self._made.done():
                self._made.result()
            if self._prompt is not None and self._prompt.done():
                self._prompt.result()
            if answer is not None:
                with call_of("generate", Exception):
                    answer.check()
            self._news.clear()
            await self._news.wait()

    async def _recover(self, failed: CallFailedError) -> None:
        """Returns once the failed call can be made again. Raises the cause of the failure if that is another one."""
        if failed.stage == "preprocess":
            self._prompt = self._prompt_ref = None
        elif self._prompt is not None:
            await self._until(self._prompt.done)
            self._prompt.result()
        await self._stages.calls.recover(failed, self._attempts, self._make_lost_again)

    def _order(self, loaded: Sequence[LoadedItem]) -> None:
        """Orders the items from the shards."""
        self._items = [_Item(one) for one in loaded]
        if loaded:
            self._made = self._noted(asyncio.create_task(all_or_none([self._make(item) for item in self._items])))

    async def _make(self, item: _Item) -> None:
        def note(pending: SharedItem) -> None:
            item.stored = pending
            self._news.set()

        item.stored = await self._stages.media.embeddings_of(self._wanted, item.loaded, note, self._pins)
        item.is_pending = False

    async def _make_lost_again(self) -> None:
        """Orders embeddings again that Generate did not get. If a replica died, another one has already replaced its
        item's reference. If no item has a new reference, the node with the data is gone: all items are evicted."""
        assert self._made is not None, "there are items"
        await asyncio.shield(self._made)
        if self._embeddings() == self._handed_over:
            for item, lost in zip(self._items, self._handed_over, strict=True):
                self._stages.media.evict(item.loaded, lost)
            self._order([item.loaded for item in self._items])

    def _unrendered(self) -> UnrenderedPrompt | None:
        """Returns the prompt for Generate to render, None if it is long."""
        wanted, infos = self._wanted, self._infos
        if not wanted.is_short(sum(len(info.expansion.token_ids) for info in infos)):
            return None
        return UnrenderedPrompt(wanted.prompt, wanted.truncation, tuple(self._mm_hashes), tuple(infos))

    def _render(self) -> None:
        def note(ref: ObjectRef) -> None:
            self._prompt_ref = ref
            self._news.set()

        rendering = self._stages.rendered(self._wanted, self._mm_hashes, self._infos, note)
        self._prompt = self._noted(asyncio.create_task(rendering))

    @contextmanager
    def _generate(self, unrendered: UnrenderedPrompt | None) -> Iterator[AnswerStream]:
        """Calls Generate. An error in the block ends the call."""
        wanted, stages = self._wanted, self._stages
        self._handed_over = self._embeddings()
        items = [ItemEmbeddings(ref, item.is_pending) for ref, item in zip(self._handed_over, self._items, strict=True)]
        # By gRPC, a replica's report may count a call that has ended, and a turn misses the replica with its prefix.
        handle = stages.generate if items and stages.chooses_by_prefix else stages.generate_by_grpc
        if stages.chooses_by_prefix:
            key, salt = wanted.cache_key, wanted.prefix_salt
            affinity = affinity_of(wanted.prompt, self._mm_hashes, salt=salt, key=key)
            handle = handle.options(session_id=affinity.session_id)
        job = partial(
            GenerateJob,
            wanted.request_id,
            unrendered or self._rendered(),
            wanted.params,
            items,
            context=wanted.context,
            cache_salt=wanted.cache_salt,
            prompt_salt=wanted.prompt_salt,
            priority=wanted.priority,
            adapter=wanted.adapter,
            pools=wanted.pools,
        )

        def start(address: PieceAddress) -> DeploymentResponse[None]:
            return handle.remote(job(address=address))

        with call_of("generate", Exception):
            answer = stages.receiver.call(start, wanted.cache_salt, self._news)
        try:
            yield answer
        except BaseException:
            answer.close()
            raise

    async def _field_of(self, index: int) -> str:
        """Returns the client's name for an item of the prompt."""
        prompt = self._prompt or self._stages.rendered(self._wanted, self._mm_hashes, self._infos)
        return (await prompt).placed([item.loaded for item in self._items])[index].source.field

    @property
    def _mm_hashes(self) -> list[str]:
        return [item.loaded.mm_hash for item in self._items]

    @property
    def _infos(self) -> list[ItemInfo]:
        return [item.stored.info for item in self._items if item.stored is not None]

    def _rendered(self) -> ProcessedPrompt | PackedReference:
        """Returns the prompt, or a reference if it is pending. A retry has the prompt itself, which may be lost with
        its node."""
        assert self._prompt is not None, "a long prompt is rendered first"
        assert self._prompt_ref is not None
        return self._prompt.result() if has_result(self._prompt) else PackedReference.of(self._prompt_ref)

    def _embeddings(self) -> list[PackedReference]:
        return [item.stored.ref for item in self._items if item.stored is not None]

    def _noted(self, work: "asyncio.Task[ResultT]") -> "asyncio.Task[ResultT]":
        def note(done: "asyncio.Task[ResultT]") -> None:
            if not done.cancelled():
                done.exception()  # retrieved, or asyncio logs it
            self._news.set()

        work.add_done_callback(note)
        return work
