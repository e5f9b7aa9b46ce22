"""Molmo 2: item embeddings are added to token embeddings, and attention is bidirectional over all items together."""

from itertools import chain

from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily
from raylens.llm.prompt_layout import PLAIN, BidirectionalSpan, PromptLayout
from raylens.preprocess.schema import ProcessedPrompt


def _layout(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    """Makes all picture tokens one span. Picture tokens are the tokens beyond the text model's vocabulary: the marks at
    edges and row ends of pictures are among them, the timestamps between the frames of a video are not.
    """
    vocab_size = model.config.text_config.vocab_size
    ranges = (range(item.offset, item.offset + item.length) for item in prompt.placeholders)
    members = sorted(position for position in chain(*ranges) if prompt.prompt_token_ids[position] >= vocab_size)
    if not members:
        return PLAIN
    return PromptLayout(spans=(BidirectionalSpan.of(members),), is_prefix_cacheable=len(prompt.placeholders) == 1)


MOLMO2 = LanguageFamily(whole="Molmo2ForConditionalGeneration", layout=_layout, has_spans=True, adds_embeddings=True)
