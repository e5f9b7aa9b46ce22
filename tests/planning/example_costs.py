"""Costs that tests plan with: round figures of no machine."""

from typing import Any

from raylens.planning.costs import Costs


def example_values(**groups: Any) -> dict[str, Any]:
    """Returns the fields of a costs file. `groups` replace figures of theirs by name, e.g. `generate={...}`."""
    stage = {"reserved": {"cpus": 1.0}, "work": {}}
    values: dict[str, Any] = {
        "version": 1,
        "measured_on": {"processor": "none", "cpus": 2},
        "model": {"name": "example", "patches_per_picture": 100, "tokens_per_picture": 50},
        "proxy": stage,
        "ingress": {**stage, "work": {"seconds_per_request": 0.002, "seconds_per_piece": 0.00002}},
        "shared": {**stage, "work": {"seconds_per_new_picture": 0.001}},
        "preprocess": {**stage, "seconds_per_item": 0.002, "seconds_per_megapixel": 0.01},
        "encode": {**stage, "seconds_per_batch": 0.002, "seconds_per_patch": 0.00005},
        "generate": {
            **stage,
            "seconds_per_step": 0.002,
            "seconds_per_sequence": 0.0001,
            "seconds_per_prompt_token": 0.00005,
        },
    }
    for name, figures in groups.items():
        values[name] = {**values.get(name, {}), **figures} if isinstance(figures, dict) else figures
    return values


def example_costs(**groups: Any) -> Costs:
    return Costs.model_validate(example_values(**groups))


def idle_costs(**groups: Any) -> Costs:
    """Returns costs of which all are zero but those given."""
    free = {"seconds_per_step": 0.0, "seconds_per_sequence": 0.0, "seconds_per_prompt_token": 0.0}
    values = example_values(
        ingress={"work": {}},
        shared={"work": {}},
        preprocess={"seconds_per_item": 0.0, "seconds_per_megapixel": 0.0},
        encode={"seconds_per_batch": 0.0, "seconds_per_patch": 0.0},
        generate=free,
    )
    for name, figures in groups.items():
        values[name] = {**values[name], **figures}
    return Costs.model_validate(values)
