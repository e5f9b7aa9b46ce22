"""The multimodal processor of one model: turns prompts and encoded media into token ids, ranges and tensors.

It wraps the model's Hugging Face processor and runs it item by item, so that each item can be cached, sent and encoded
alone. Ids and tensors are the same as from a single call of the Hugging Face processor."""

import copy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedConfig

from raylens.modeling.context_length import default_context_length
from raylens.modeling.families import family_of
from raylens.modeling.model_configs import load_model_config
from raylens.modeling.pooling import NO_SETTINGS, PoolingSettings, find_pooling
from raylens.preprocess.chat_template import OWN_FORMATS, ChatFormats
from raylens.preprocess.hf_processor import ImageBackend, load_processor
from raylens.preprocess.interleaved_pixels import keep_pixels_interleaved
from raylens.preprocess.items import ItemProcessor
from raylens.preprocess.media import DEFAULT_VIDEO_FRAMES, MediaLimits
from raylens.preprocess.models.family import ProcessorFamily
from raylens.preprocess.pooled_inputs import read_input_form
from raylens.preprocess.prompt_tokenizer import PromptTokenizer
from raylens.preprocess.prompts import PromptRenderer
from raylens.preprocess.vision_plugins.registry import VisionPluginChoice, find_plugin


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """The settings of a MultiModalProcessor.

    `model`: a folder or a hub id. `video_frames`: the most frames of a video, if neither the request nor the model's
    processor sets a number or a rate. `dtype`: of the encoder's tower. `embedding_dtype`: of the encoder's output;
    None: the same. `max_model_len`: in tokens; None: the model's. `vision_plugin`: the vision encoder of a text model.
    """

    model: str
    revision: str | None = None
    image_backend: ImageBackend = "auto"
    video_frames: int = DEFAULT_VIDEO_FRAMES
    dtype: torch.dtype = torch.float32
    embedding_dtype: torch.dtype | None = None
    max_model_len: int | None = None
    limits: MediaLimits = field(default_factory=MediaLimits)
    vision_plugin: VisionPluginChoice | None = None
    chat: ChatFormats = OWN_FORMATS
    pooling: PoolingSettings = NO_SETTINGS


class MultiModalProcessor:
    """The processor of one model. `items` and `prompts` share no mutable state, so two threads may use one each."""

    def __init__(self, config: ProcessorConfig) -> None:
        hf_config = load_model_config(config.model, config.revision)
        family = _family(config, hf_config)
        processor = load_processor(family, config.model, revision=config.revision, backend=config.image_backend)
        keep_pixels_interleaved(getattr(processor, "image_processor", None))
        text_config = hf_config.get_text_config()
        self.max_model_len = default_context_length(text_config, config.max_model_len)
        # Tokenizers are not thread-safe: each half has its own.
        item_tokenizer, prompt_tokenizer = processor.tokenizer, copy.deepcopy(processor.tokenizer)
        # The tokens of items cut a text even if the tokenizer does not mark them as special.
        rules = family.modalities.values()
        boundaries = {token for one in rules for token in (one.embed_token(processor), *one.feature_tokens(processor))}
        self.items = ItemProcessor(
            processor,
            family,
            PromptTokenizer(item_tokenizer, boundaries),
            dtype=config.dtype,
            embedding_dtype=config.embedding_dtype or config.dtype,
            limits=config.limits,
            video_frames=config.video_frames,
        )
        self.prompts = PromptRenderer(
            processor,
            family,
            prompt_tokenizer,
            PromptTokenizer(prompt_tokenizer, boundaries),
            vocab_size=max(len(prompt_tokenizer), text_config.vocab_size),
            max_model_len=self.max_model_len,
            formats=config.chat,
            input_form=read_input_form(config.model, config.revision),
        )
        self.pooling = find_pooling(hf_config, prompt_tokenizer, config.model, config.revision, config.pooling)
        self.identity = self.items.identity(f"{config.model}@{config.revision}")


def _family(config: ProcessorConfig, hf_config: PreTrainedConfig) -> ProcessorFamily:
    if config.vision_plugin is not None:
        from raylens.preprocess.models.vision_plugin import plugin_family

        return plugin_family(find_plugin(config.vision_plugin, config.model), config.vision_plugin.params)
    family: ProcessorFamily = family_of("preprocess", hf_config)
    return family
