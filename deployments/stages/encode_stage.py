"""The Encode deployment: a plain class, wrapped by `deployments/app.py` or created by Generate (`encode.placement`)."""

import logging
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from raylens.deployments.config import AppConfig, VisionPartConfig
from raylens.deployments.metrics.definitions import EncodeMetrics
from raylens.deployments.replica_start import Replica, start_replica
from raylens.deployments.request_context import RequestContext, in_request
from raylens.deployments.routing.work_scaling import PendingWork
from raylens.deployments.server_log import process_name
from raylens.deployments.stages import process_setup
from raylens.deployments.stages.engine_loop import EngineDiedError, EngineLoop
from raylens.deployments.stages.memory_turn import memory_turn
from raylens.deployments.stages.preprocess_stage import load_model_processor, plugin_choice
from raylens.deployments.tracing.spans import Spans
from raylens.deployments.wire.stage_messages import EmbeddingInfo, Heartbeat
from raylens.deployments.wire.tensor_wire import PackedItem, PackedTensor
from raylens.preprocess.schema import Stopwatch

if TYPE_CHECKING:
    from raylens.encoder.config import PartConfig
    from raylens.encoder.engine import EncoderEngine
    from raylens.encoder.schema import EncodeOutput
    from raylens.preprocess.items import ItemProcessor

logger = logging.getLogger(f"ray.serve.{__name__}")

BATCHES = "batches"
_CALLS_OF_A_STEP = 3
"""The step timeout covers this many plug-in timeouts: a hung batch, then one hung item alone, then everything else."""
PROFILED_SIZES = {"image": (448, 448), "audio": (160_000,)}
"""Height and width of the image, and samples of the sound, that measure activations."""


class Encode(Replica):
    """Encodes the waiting items in batches."""

    def __init__(self, config: AppConfig, *, spans: Spans | None = None) -> None:
        """`spans`: those of the enclosing Generate replica; None in a replica of Encode."""
        is_alone = spans is None
        if spans is None:
            spans = start_replica("encode", config)
            process_setup.set_up_torch(config.encode.num_cpus)
        self._spans = spans
        # A Generate replica's turn covers its encoder.
        with memory_turn(config.encoder_device) if is_alone else nullcontext():
            self._engine = self._load(config)
        give_way = partial(process_setup.give_way_to_answers, process_setup.ENCODER_NICENESS)
        self._loop: EngineLoop[EncodeOutput] = EngineLoop(
            self._engine, name="encoder-engine", step_timeout_s=config.step_timeout_s, initializer=give_way
        )
        self._metrics = EncodeMetrics()
        self._pending = PendingWork(BATCHES)
        self._details = process_setup.kernels_in_use(config.part_device(config.encode.tower))
        self._report_regularly(self._report)
        process_setup.end_startup()

    def _load(self, config: AppConfig) -> "EncoderEngine":
        from raylens.encoder.config import EncoderConfig
        from raylens.encoder.engine import EncoderEngine

        settings = config.encode
        engine = EncoderEngine(
            EncoderConfig(
                config.model,
                config.revision,
                tower=part_config(config, settings.tower),
                projector=part_config(config, settings.projector),
                vision_plugin=plugin_choice(config),
                # After a batch that times out, the same step retries each item alone.
                plugin_timeout_s=config.step_timeout_s / _CALLS_OF_A_STEP,
                num_threads=config.num_threads,
            )
        )
        items = load_model_processor(config).items
        measured = [modality for modality in PROFILED_SIZES if modality in items.modalities]
        for modality in measured:
            blank = items.blank_item(modality, PROFILED_SIZES[modality])[1]
            engine.bound_activations(modality, blank, settings.activation_bytes)
        for modality in measured:
            warn_of_largest_item(engine, items, modality)
        return engine

    async def encode(
        self, request_id: str, modality: str, item: PackedItem, sent_at: float, context: RequestContext
    ) -> tuple[PackedTensor, EmbeddingInfo]:
        """Returns the embeddings (num_embeds, embedding_size) and an EmbeddingInfo. `sent_at`: wall time of the
        call."""
        watch = Stopwatch()
        with in_request(context):
            output = await self._encoded(request_id, modality, item, watch)
        assert output.embeddings is not None
        self._metrics.batch_size.observe(output.batch_size)
        packed_at = max(tensor.packed_at for tensor in item.values())
        self._metrics.remote_bytes.inc(sum(tensor.num_remote_bytes for tensor in item.values()))
        info = EmbeddingInfo(
            output.embeddings.nbytes,
            max(0.0, watch.started_at - max(sent_at, packed_at)),
            output.queue_seconds,
            output.encode_seconds,
            arrived_at=watch.started_at,
            place=process_name(),
        )
        self._spans.record(context, info.times, {"raylens.batch_size": output.batch_size})
        return PackedTensor.pack(output.embeddings), info

    async def _encoded(self, request_id: str, modality: str, item: PackedItem, watch: Stopwatch) -> "EncodeOutput":
        """Raises the item's error if it cannot be encoded. `watch` started when the item arrived."""
        tensors = {name: tensor.unpack() for name, tensor in item.items()}
        outputs: list[EncodeOutput] = []

        def receive(ready: "list[EncodeOutput]") -> bool:
            outputs.extend(ready)
            return True

        status = "aborted"
        try:
            with self._pending.call(self._engine.num_batches(modality, tensors)):
                await self._loop.run(
                    request_id,
                    lambda id_: self._engine.add_request(id_, modality, tensors, arrival=watch.started),
                    receive,
                )
            (output,) = outputs
            status = "ok" if output.error is None else "error"
        except Exception:
            status = "error"
            raise
        finally:
            self._metrics.items_total.inc(modality=modality, status=status)
        if output.error is not None:
            if (cause := output.error.__cause__) is not None:  # Ray Serve does not transmit it
                logger.error("request %s: %s", request_id, output.error, exc_info=cause)
            raise output.error
        return output

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._pending.stats()

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat(self._loop.heartbeat_age, details=self._details)

    def check_health(self) -> None:
        """Raises EngineDiedError if Ray Serve must replace the replica."""
        self._loop.check_health()
        if self._engine.has_hung:
            raise EngineDiedError("a call of the vision plug-in took too long, and still runs")

    def _report(self) -> None:
        num_items, num_patches = self._engine.waiting
        self._metrics.waiting_items.set(num_items)
        self._metrics.waiting_patches.set(num_patches)


def warn_of_largest_item(engine: "EncoderEngine", items: "ItemProcessor", modality: str) -> None:
    num_patches = engine.largest_segment(modality, items.largest_item(modality)[1])
    if num_patches > engine.max_segment_patches[modality]:
        logger.warning(
            "encode.activation_bytes has room to encode %d patches together; the model's largest %s needs %d, and"
            " Encode refuses those that need more",
            *(engine.max_segment_patches[modality], {"image": "picture", "audio": "sound"}[modality], num_patches),
        )


def part_config(config: AppConfig, part: VisionPartConfig) -> "PartConfig":
    """Returns the resolved settings of the tower or the projector."""
    import torch

    from raylens.encoder.config import PartConfig
    from raylens.modeling.packed_linear import packable_dtypes

    device, dtype = config.part_device(part), getattr(torch, config.part_dtype_name(part))
    linear = config.encode.linear
    if linear == "auto":
        linear = "packed" if device == "cpu" and dtype in packable_dtypes() else "plain"
    return PartConfig(dtype, device, linear, exact=config.is_exact(part.dtype))
