"""Which stages make an item: those of the model that its order names."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.config import SharedConfig
from deployments.metrics.definitions import ItemMetrics
from deployments.request_context import RequestContext
from deployments.shared.item_maker import ItemMaker
from deployments.shared.item_states import ItemOrder
from deployments.shared.stage_calls import StageCalls, StageUnavailableError
from deployments.stages.stage_handles import StageHandles
from deployments.tracing import Spans

SUFFIXES = ("", "-second")


class CalledError(Exception):
    """Names the stage that was called."""


def stage(name: str) -> Any:
    def call(*_: object) -> None:
        raise CalledError(name)

    methods = SimpleNamespace(process_item=SimpleNamespace(remote=call))
    return SimpleNamespace(options=lambda **_: methods)


def maker() -> ItemMaker:
    nothing: Any = None
    stages = {suffix: StageHandles(stage(f"Preprocess{suffix}"), nothing, {}) for suffix in SUFFIXES}
    return ItemMaker(SharedConfig(), stages, StageCalls(nothing), ItemMetrics(), Spans())


def order(model: str) -> ItemOrder:
    return ItemOrder(RequestContext("r"), "r", model, f"hash of {model}", "image", b"content", 1, 1, {}, False)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_model_s_own_stages_make_its_items(suffix: str) -> None:
    with pytest.raises(CalledError, match=f"Preprocess{suffix}$"):
        asyncio.run(maker().processed_of(order(suffix)))


def test_a_model_that_the_shard_has_not_heard_of_is_not_available() -> None:
    with pytest.raises(StageUnavailableError, match="the preprocess stage is not available"):
        asyncio.run(maker().processed_of(order("-third")))
