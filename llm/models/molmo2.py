"""Molmo 2: an item's embeddings are added to those of its tokens, and all tokens of all items see each other."""

from itertools import chain

from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily
from raylens.llm.prompt_layout import PLAIN, BidirectionalSpan, PromptLayout
from raylens.preprocess.schema import ProcessedPrompt


def _layout(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    """Makes all tokens of pictures one span. The marks at the edges and row ends of pictures count as such tokens, the
    times that stand between the frames of a video do not.

    The tokens of pictures are those behind the text model's vocabulary.
    """
    vocab_size = model.config.text_config.vocab_size
    ranges = (range(item.offset, item.offset + item.length) for item in prompt.placeholders)
    members = sorted(position for position in chain(*ranges) if prompt.prompt_token_ids[position] >= vocab_size)
    if not members:
        return PLAIN
    return PromptLayout(spans=(BidirectionalSpan.of(members),), is_prefix_cacheable=len(prompt.placeholders) == 1)


MOLMO2 = LanguageFamily(
    whole="Molmo2ForConditionalGeneration",
    layout=_layout,
    has_spans=True,
    adds_embeddings=True,
)
