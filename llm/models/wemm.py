"""WeMM: InternLM2 with a partial LoRA at all positions of a picture, the two splitters included."""

from torch import nn
from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily
from raylens.llm.models.internlm2 import PLORA_RENAMINGS, InternLM2ForCausalLM
from raylens.modeling.wemm_config import WemmConfig


class WemmLanguageModel(PreTrainedModel):
    """The language half of WeMM."""

    config: WemmConfig
    base_model_prefix = ""
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = (r"^(vision_tower|downsampler|visual_source_spliter_emb)\.",)

    def __init__(self, config: WemmConfig) -> None:
        super().__init__(config)
        self.language_model = InternLM2ForCausalLM(config.text_config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()


WEMM = LanguageFamily(
    whole=WemmLanguageModel, unused=(), renamings=PLORA_RENAMINGS, decoder="language_model.model", takes_item_mask=True
)
