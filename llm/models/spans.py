"""Families with bidirectional attention within spans of the prompt."""

from dataclasses import replace
from itertools import chain, groupby

from transformers import PreTrainedConfig, PreTrainedModel

from raylens.llm.models.family import LanguageFamily, capped_output_head
from raylens.llm.models.found import find_language_family
from raylens.llm.prompt_layout import PLAIN, BidirectionalSpan, PromptLayout
from raylens.preprocess.schema import ProcessedPrompt


def layout_of_runs(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    """Makes each run of a picture's placeholders a span: an item with crops has one span for the picture and one for
    every crop. Tokens of sounds see only earlier ones."""
    sound: int | None = getattr(model.config, "audio_token_id", None)
    spans = []
    for placeholder in prompt.placeholders:
        positions = placeholder.embed_positions()
        if prompt.prompt_token_ids[positions[0]] == sound:
            continue
        runs = groupby(enumerate(positions), key=lambda indexed: indexed[1] - indexed[0])
        spans += [BidirectionalSpan.of([position for _, position in run]) for _, run in runs]
    return PromptLayout(spans=tuple(sorted(spans, key=lambda span: span.start)))


def gemma4_unified(config: PreTrainedConfig) -> LanguageFamily:
    family = replace(find_language_family(config), logits=capped_output_head)
    if config.get_text_config().use_bidirectional_attention != "vision":
        return family
    return replace(family, layout=layout_of_runs, has_spans=True, windows_cut_spans=False)


GEMMA3 = LanguageFamily(whole="Gemma3ForConditionalGeneration", layout=layout_of_runs, has_spans=True)


def _molmo2_layout(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    """Makes all picture tokens one span. Picture tokens are the tokens beyond the text model's vocabulary: the marks at
    edges and row ends of pictures are among them, the timestamps between the frames of a video are not."""
    vocab_size = model.config.text_config.vocab_size
    ranges = (range(item.offset, item.offset + item.length) for item in prompt.placeholders)
    members = sorted(position for position in chain(*ranges) if prompt.prompt_token_ids[position] >= vocab_size)
    if not members:
        return PLAIN
    return PromptLayout(spans=(BidirectionalSpan.of(members),), is_prefix_cacheable=len(prompt.placeholders) == 1)


MOLMO2 = LanguageFamily(
    whole="Molmo2ForConditionalGeneration", layout=_molmo2_layout, has_spans=True, adds_embeddings=True
)
"""Item embeddings are added to token embeddings."""


def _paligemma_layout(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    whole = BidirectionalSpan.of(range(len(prompt.prompt_token_ids)))
    return PromptLayout(rope_offsets=(1,), spans=(whole,), is_prefix_cacheable=False)


PALIGEMMA = LanguageFamily(
    whole="PaliGemmaForConditionalGeneration",
    layout=_paligemma_layout,
    has_spans=True,
    windows_cut_spans=False,
    logits=capped_output_head,
)
"""PaliGemma and PaliGemma 2. Positions start at 1."""
