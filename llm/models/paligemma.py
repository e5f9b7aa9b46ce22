"""PaliGemma and PaliGemma 2: bidirectional attention over the whole prompt, and positions that start at 1."""

from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily, capped_output_head
from raylens.llm.prompt_layout import BidirectionalSpan, PromptLayout
from raylens.preprocess.schema import ProcessedPrompt


def _layout(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    whole = BidirectionalSpan.of(range(len(prompt.prompt_token_ids)))
    return PromptLayout(rope_offsets=(1,), spans=(whole,), is_prefix_cacheable=False)


PALIGEMMA = LanguageFamily(
    whole="PaliGemmaForConditionalGeneration",
    layout=_layout,
    has_spans=True,
    windows_cut_spans=False,
    logits=capped_output_head,
)
