"""The configurations of WeMM and of its text model, which transformers lacks.

Before importing this module, make torchvision importable: see `modeling/model_configs.py`."""

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig


@strict
class InternLM2Config(LlamaConfig):
    """InternLM2, whose layers may have a partial LoRA (PLoRA).

    `bias`: whether the attention's projections have biases. `plora_rank`: the rank of the LoRA at images' positions; 0:
    no LoRA."""

    model_type = "internlm2"
    base_model_tp_plan = None

    rope_parameters: Any = None
    bias: bool = False
    plora_rank: int = 256

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # Dynamic scaling affects only sequences beyond `max_position_embeddings`.
        if self.rope_parameters["rope_type"] == "dynamic":
            self.rope_parameters = {"rope_type": "default", "rope_theta": self.rope_parameters["rope_theta"]}


@strict
class WemmConfig(PreTrainedConfig):
    """WeMM: an Idefics2 vision tower, a convolution that joins its patches, and InternLM2 with a PLoRA.

    `image_processor`: the settings of the image processor. `downsampler_config`: `visual_hidden_size`,
    `llm_hidden_size`, `kernel_size`, `stride`, `depth`, `hidden_act` and `bias`. `spliter_emb_config`: `num_embeddings`
    and `embedding_dim`. All names are from the published files."""

    model_type = "wemm"
    sub_configs_defaults = {
        "text_config": InternLM2Config,
        "vision_config": SubConfigSpec(config_class=Idefics2VisionConfig),
    }

    text_config: Any = None
    vision_config: Any = None
    downsampler_config: dict[str, Any] = field(default_factory=dict)
    spliter_emb_config: dict[str, Any] = field(default_factory=dict)
    image_processor: dict[str, Any] = field(default_factory=dict)
    do_image_splitting: bool = False
    tie_word_embeddings: bool = False
