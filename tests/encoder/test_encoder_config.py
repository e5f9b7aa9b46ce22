"""Settings that cannot be are refused by the name of the field."""

from typing import Any

import pytest
import torch

from raylens.encoder.config import EncoderConfig, PartConfig


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"dtype": torch.int8}, "dtype"),
        ({"dtype": torch.float64}, "dtype"),
        ({"linear": "int4"}, "linear"),
        ({"device": "the graphics card"}, "device"),
        ({"device": "cuda", "linear": "packed"}, "linear"),
        ({"device": "cuda", "linear": "int8"}, "linear"),
        ({"dtype": torch.float16, "linear": "packed"}, "linear"),
        ({"dtype": torch.bfloat16, "linear": "int8"}, "linear"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} "):
        PartConfig(**settings)


def test_the_default_is_plain_float32_on_the_cpu() -> None:
    config = EncoderConfig("model")
    assert config.tower == config.projector == PartConfig(torch.float32, "cpu", "plain")
    PartConfig(torch.bfloat16, "cuda:1", "plain")
