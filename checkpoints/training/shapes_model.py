"""The tiny LLaVA: its tokenizer, processor and configuration, saved as a Hugging Face folder.

Knows nothing about scenes or training. Only the tokenizer's post-processor adds the BOS token. The chat template does
not write it, so tokenised chats have it exactly once.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoProcessor,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

BOS, EOS, PAD, IMAGE = "<s>", "</s>", "<pad>", "<image>"
VOCAB_SIZE = 768
IMAGE_SIZE, PATCH_SIZE = 96, 16
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2
PIXEL_MEAN = PIXEL_STD = 0.5
RESAMPLE = Image.Resampling.BICUBIC
MAX_POSITIONS = 2048

# The images of a message come first, for any order of its parts, as in the llava-hf checkpoints.
# No space precedes </s>, so that the tokens of a past answer equal the generated tokens.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if message['role'] == 'system' -%}{%- set head = '' -%}{%- set tail = '\\n' -%}
{%- elif message['role'] == 'user' -%}{%- set head = 'USER: ' -%}{%- set tail = ' ' -%}
{%- elif message['role'] == 'assistant' -%}{%- set head = 'ASSISTANT: ' -%}{%- set tail = '</s>' -%}
{%- else -%}{{- raise_exception('unknown role: ' + message['role']) -}}
{%- endif -%}
{{- head -}}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content if part['type'] in ('image', 'image_url') -%}{{- '<image>\\n' -}}{%- endfor -%}
{%- for part in content if part['type'] == 'text' -%}
{{- '' if loop.first else ' ' -}}{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- tail -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""


def build_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE trained on `corpus`. It encodes any text, because the vocabulary has all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Like Llama's: the space after "ASSISTANT:" is not part of the decoded answer.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, IMAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    wrap: Any = PreTrainedTokenizerFast  # has no types of its own
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    return wrapped


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Returns a processor that resizes every picture to 96x96 and expands `<image>` to one token a patch."""
    edge = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    image_processor = CLIPImageProcessorPil(
        do_resize=True,
        size=edge,
        resample=RESAMPLE,
        do_center_crop=False,
        crop_size=edge,
        do_normalize=True,
        image_mean=[PIXEL_MEAN] * 3,
        image_std=[PIXEL_STD] * 3,
        do_convert_rgb=True,
    )
    combine: Any = LlavaProcessor  # has no types of its own
    processor: LlavaProcessor = combine(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's class token, dropped by the "default" strategy
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
    )
    return processor


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """Returns the untrained model, 2.8 million parameters."""
    special_ids: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    image_token_index: Any = tokenizer.convert_tokens_to_ids(IMAGE)
    config = LlavaConfig(
        vision_config=_vision_config(),
        text_config=_text_config(special_ids),
        image_token_index=image_token_index,
        image_seq_length=TOKENS_PER_IMAGE,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **special_ids,
    )
    model = LlavaForConditionalGeneration(config)
    greedy: Any = GenerationConfig
    model.generation_config = greedy(do_sample=False, max_new_tokens=64, **special_ids)
    return model


def _vision_config() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=128,
    )


def _text_config(special_ids: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        **special_ids,
    )


def load_processor(folder: Path) -> LlavaProcessor:
    """Returns the processor of a saved checkpoint."""
    auto: Any = AutoProcessor
    processor: LlavaProcessor = auto.from_pretrained(folder)
    for passing in ("is_local", "local_files_only", "model_specific_special_tokens"):
        processor.tokenizer.init_kwargs.pop(passing, None)  # concerns this loading only, not to be saved
    return processor


def save_checkpoint(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """Writes the checkpoint with bf16 weights. A reader of `folder` never sees a partial file."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    rounded: Any = LlavaForConditionalGeneration(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = model.generation_config
    rounded.to(torch.bfloat16).save_pretrained(unfinished)
    processor.save_pretrained(unfinished)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(unfinished.iterdir()):
        file.chmod(0o644)
        file.replace(folder / file.name)
    unfinished.rmdir()
