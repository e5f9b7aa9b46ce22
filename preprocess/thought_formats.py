"""The tags that models write around the thoughts before an answer, and how the ones of a model are found."""

from collections.abc import Mapping

from raylens.preprocess.schema import ThoughtFormat

_THINK = ThoughtFormat("<think>", "</think>")

FORMATS: Mapping[str, ThoughtFormat] = {
    **dict.fromkeys(("deepseek_r1", "qwen3", "glm45", "minimax_m2", "step3", "kimi_k2"), _THINK),
    "mistral": ThoughtFormat("[THINK]", "[/THINK]"),
    "kimi_vl": ThoughtFormat("◁think▷", "◁/think▷"),
    "cohere": ThoughtFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ThoughtFormat("<|channel>thought\n", "<channel|>"),
    "seed_oss": ThoughtFormat("<seed:think>", "</seed:think>"),
    "granite": ThoughtFormat("Here is my thought process:", "Here is my response:"),
}
"""By vLLM's names where vLLM has one."""
_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names of thoughts in response templates."""


def find_thought_format(template: object, response_template: object) -> ThoughtFormat | None:
    """Returns the tags that the tokenizer's response template declares, else those that the chat template contains, or
    None. Chat templates contain the end tag: they leave earlier thoughts out, or write them."""
    return _declared(response_template) or next(
        (one for one in FORMATS.values() if isinstance(template, str) and one.end in template), None
    )


def _declared(response_template: object) -> ThoughtFormat | None:
    match response_template:
        case {"fields": {**fields}}:
            for name in _FIELDS:
                match fields.get(name):
                    case {"open": str(start), "close": str(end)}:
                        return ThoughtFormat(start, end)
    return None
