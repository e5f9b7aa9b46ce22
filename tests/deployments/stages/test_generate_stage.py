"""What Generate tells its engine."""

import pytest

from raylens.deployments.config import AppConfig
from raylens.deployments.stages.generate_stage import _largest_picture_tokens
from raylens.deployments.stages.preprocess_stage import load_model_processor
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine


def test_an_engine_without_room_for_the_models_largest_picture_does_not_start(shapes: str) -> None:
    config = AppConfig(model=shapes, max_model_len=36)
    num_tokens = _largest_picture_tokens(load_model_processor(config).items)
    with pytest.raises(ValueError, match=r"the model's largest picture takes 36 tokens, .* max_model_len is 36"):
        LLMEngine(EngineConfig(shapes, max_model_len=config.max_model_len, largest_item_tokens=num_tokens))
