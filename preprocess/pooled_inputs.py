"""The prompts of inputs that are embedded, classified or scored: in the form that the checkpoint was trained with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raylens.modeling.checkpoint_files import read_json
from raylens.preprocess.models.family import InputFrames
from raylens.preprocess.schema import ChatPrompt, InvalidRequestError, Message, PooledPrompt, TextPrompt

Parts = list[dict[str, str]]

_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the"
    ' answer can only be "yes" or "no".'
)
"""The instruction and the system message of Qwen's rerankers, see https://github.com/QwenLM/Qwen3-VL-Embedding."""


@dataclass(frozen=True, slots=True)
class InputForm:
    """What sentence-transformers' files of a checkpoint say. `prompts`: what goes before an input, by its purpose; in a
    conversation it is the system message. `default_prompt`: the name of the one for all other inputs. `is_chat`:
    whether an input is a user's message for the chat template, which `begins_answer` or not."""

    prompts: Mapping[str, str]
    default_prompt: str | None = None
    is_chat: bool = False
    begins_answer: bool = False

    def prompt_for(self, given: PooledPrompt) -> str:
        if given.instruction is not None:
            return given.instruction
        purpose = given.purpose if given.purpose in self.prompts else self.default_prompt
        return self.prompts.get(purpose or "", "")


PLAIN = InputForm({})


def read_input_form(model: str, revision: str | None = None) -> InputForm:
    """Returns the form of a checkpoint, a folder or a hub id; PLAIN if it has no such files."""
    known = read_json(model, "config_sentence_transformers.json", revision) or {}
    transformer = read_json(model, "sentence_bert_config.json", revision) or {}
    template = transformer.get("processing_kwargs", {}).get("chat_template", {})
    return InputForm(
        prompts=known.get("prompts") or {},
        default_prompt=known.get("default_prompt_name"),
        is_chat="message" in transformer.get("modality_config", {}),
        begins_answer=bool(template.get("add_generation_prompt")),
    )


class PooledInputs:
    """Makes the prompts of one model. `frames`: of the model's family, with its `processor`, go before `form`.
    `text_of` returns a modality's placeholder. `takes_pairs`: whether the chat template writes messages of the roles
    query and document."""

    def __init__(
        self,
        form: InputForm,
        text_of: Callable[[str], str],
        *,
        takes_pairs: bool,
        frames: InputFrames | None = None,
        processor: Any = None,
    ) -> None:
        self._form = form
        self._text_of = text_of
        self._takes_pairs = takes_pairs
        self._frames = frames
        self._processor = processor

    def prompt(self, given: PooledPrompt) -> ChatPrompt | TextPrompt:
        """Returns the prompt of an input. Raises InvalidRequestError for one that the model does not take."""
        if given.query is not None:
            return self._pair(given, given.query)
        if self._frames is not None:
            return TextPrompt(self._framed(self._frames, given.content))
        if not self._form.is_chat:
            return TextPrompt(self._form.prompt_for(given) + self._joined(given.content))
        return self._chat([*self._system(given), {"role": "user", "content": given.content}])

    def _pair(self, given: PooledPrompt, query: Parts) -> ChatPrompt:
        if self._takes_pairs:
            pair: list[Message] = [{"role": "query", "content": query}, {"role": "document", "content": given.content}]
            return self._chat([*self._system(given), *pair], begins_answer=True)
        asked = f"<Instruct>: {given.instruction or _INSTRUCTION}<Query>:"
        content = [_text(asked), *query, _text("\n<Document>:"), *given.content]
        return self._chat(
            [{"role": "system", "content": _JUDGE}, {"role": "user", "content": content}], begins_answer=True
        )

    def _system(self, given: PooledPrompt) -> list[Message]:
        before = self._form.prompt_for(given)
        return [{"role": "system", "content": before}] if before else []

    def _chat(self, messages: list[Message], *, begins_answer: bool = False) -> ChatPrompt:
        return ChatPrompt(messages, add_generation_prompt=begins_answer or self._form.begins_answer)

    def _framed(self, frames: InputFrames, content: Parts) -> str:
        texts = [part["text"] for part in content if part["type"] == "text"]
        if len(texts) == len(content):
            return frames.query(self._processor, "".join(texts))
        if texts or len(content) > 1:
            raise InvalidRequestError("this model embeds a text or one picture, not several together", field="input")
        return frames.page(self._processor)

    def _joined(self, content: Parts) -> str:
        return "".join(part["text"] if part["type"] == "text" else self._text_of(part["type"]) for part in content)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
