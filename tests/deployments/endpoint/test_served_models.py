"""Which model a request is for, and what all of them tell."""

from types import SimpleNamespace
from typing import Any

import pytest

from raylens.deployments.endpoint.served_models import ModelRoute, ServedModels
from raylens.preprocess.schema import InvalidRequestError


class Monitor:
    served = None

    def __init__(self, *adapters: str, **states: str) -> None:
        self.adapters: dict[str, str | None] = dict.fromkeys(adapters)
        self._states = states

    @property
    def is_ready(self) -> bool:
        return set(self._states.values()) == {"ready"}

    def states(self) -> dict[str, str]:
        return self._states

    def details(self) -> dict[str, dict[str, str]]:
        return {"generate": {"kernels": "avx2"}}


def route(name: str, suffix: str, *adapters: str, **states: str) -> ModelRoute:
    monitor: Any = Monitor(*adapters, **{"shared": "ready", "generate": "ready", **states})
    nothing: Any = SimpleNamespace()
    return ModelRoute(name, suffix, monitor, nothing, nothing)


FIRST, SECOND = route("a", ""), route("org/b", "-org%2Fb", generate="starting")


def test_a_name_finds_its_model_and_no_name_the_first() -> None:
    models = ServedModels([FIRST, SECOND])
    assert [models.of(name) for name in ("a", "org/b", None)] == [FIRST, SECOND, FIRST]
    assert [card.id for card in models.cards] == ["a", "org/b"]


def test_the_first_that_has_a_name_answers_to_it_and_models_go_before_adapters() -> None:
    first, second = route("a", "", "tuned", "b", "a"), route("b", "-b", "tuned", "other")
    models = ServedModels([first, second])
    assert [models.of(name) for name in ("a", "b", "tuned", "other")] == [first, second, first, second]
    assert [(card.id, card.parent) for card in models.cards] == [
        ("a", None),
        ("tuned", "a"),
        ("b", None),
        ("other", "b"),
    ]
    assert [models.card(name).parent for name in ("a", "b", "tuned", "other")] == [None, None, "a", "b"]
    assert (first.adapter_of("tuned"), first.adapter_of("a")) == ("tuned", None)


@pytest.mark.parametrize("name", ["", "b", "A", "org%2Fb", "x" * 1000])
def test_another_name_is_a_404_that_lists_what_is_served(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not served here, only 'a', 'org/b'") as caught:
        ServedModels([FIRST, SECOND]).of(name)
    assert (caught.value.status, caught.value.code, caught.value.field) == (404, "model_not_found", "model")
    assert len(str(caught.value)) < 200


def test_health_names_the_stages_of_all_models_and_the_shards_once() -> None:
    assert ServedModels([FIRST]).health().ready
    health = ServedModels([FIRST, SECOND]).health()
    assert not health.ready
    assert health.stages == {"shared": "ready", "generate": "ready", "generate-org%2Fb": "starting"}
    assert set(health.details) == {"generate", "generate-org%2Fb"}


def test_an_adapter_that_cannot_be_served_is_named_with_the_reason() -> None:
    own = route("a", "", "good")
    monitor: Any = own.monitor
    monitor.adapters["bad"] = "use_dora is True"
    models = ServedModels([SECOND, own])
    assert [card.id for card in models.cards] == ["org/b", "a", "good"]
    for ask in (models.of, models.card):
        with pytest.raises(InvalidRequestError, match="adapter 'bad' cannot be served: use_dora is True") as refused:
            ask("bad")
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
