"""Gemma 3: bidirectional attention within a picture; most layers have a sliding window."""

from itertools import groupby

from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily
from raylens.llm.prompt_layout import BidirectionalSpan, PromptLayout
from raylens.preprocess.schema import ProcessedPrompt


def _layout(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    """Makes each run of placeholders a span: an item with crops has one span for the picture and one for every crop."""
    spans = []
    for placeholder in prompt.placeholders:
        runs = groupby(enumerate(placeholder.embed_positions()), key=lambda indexed: indexed[1] - indexed[0])
        spans += [BidirectionalSpan.of([position for _, position in run]) for _, run in runs]
    return PromptLayout(spans=tuple(sorted(spans, key=lambda span: span.start)))


GEMMA3 = LanguageFamily(whole="Gemma3ForConditionalGeneration", layout=_layout, has_spans=True)
