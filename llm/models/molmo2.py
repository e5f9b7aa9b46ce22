"""Molmo 2: features are added to the embeddings of their tokens; all tokens of all pictures see each other."""

from itertools import chain

from transformers import PreTrainedModel

from llm.models.family import LanguageFamily
from llm.prompt_layout import PLAIN, BidirectionalSpan, PromptLayout
from preprocess.schema import ProcessedPrompt


def _layout(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    """The marks at the edges and row ends of pictures count as theirs, the times that stand between frames do not.

    Tokens of pictures are those behind the text model's own vocabulary.
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
