"""`POST /tokenize`, `/detokenize` and `/render`: the token ids of a prompt, without generating anything."""

from typing import Self

from pydantic import BaseModel, Field, model_validator

from raylens.deployments.api.content import TextPart
from raylens.deployments.api.messages import Messages, TemplateFields
from raylens.deployments.api.prompt_fields import MediaFields
from raylens.deployments.api.prompts import PlainPrompt, PromptMedia, TokenIds, prompt_and_media
from raylens.deployments.api.wire import RequestBody
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.preprocess.schema import ChatPrompt, Prompt, TextPrompt


class TokenizeRequest(RequestBody, TemplateFields):
    """A text or a conversation. The answer has the tokens of its text alone, without those of media."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = Field(True, description="what the tokenizer itself puts around a text, e.g. BOS")

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either prompt or messages")
        for message in self.messages or ():
            if isinstance(message.content, list) and not all(isinstance(part, TextPart) for part in message.content):
                raise ValueError("messages may hold text only; POST /render takes media")
        return self

    def to_prompt(self) -> ChatPrompt | TextPrompt:
        return self.chat_and_media(self.messages or [])[0] if self.prompt is None else TextPrompt(self.prompt)


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    prompt: str


class RenderRequest(MediaFields, PromptMedia, TemplateFields):
    """A conversation, or a prompt in any form that `/v1/completions` takes."""

    model: str | None = None
    messages: Messages | None = None
    prompt: PlainPrompt | None = None
    max_tokens: int | None = Field(None, ge=1, description="what truncate_prompt_tokens: -1 leaves room for")

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either prompt or messages")
        if self.messages is not None and self.multi_modal_data is not None:
            raise ValueError("multi_modal_data goes with prompt; messages hold their own media")
        return self

    def prompt_and_media(self) -> tuple[Prompt, list[MediaSource]]:
        """Returns the pipeline's prompt and its media. Raises InvalidRequestError."""
        if self.prompt is not None:
            return prompt_and_media(self.prompt, self.multi_modal_data, "prompt")
        return self.chat_and_media(self.messages or [])


class RenderedItem(BaseModel):
    """An item's place in the prompt: the positions [offset, offset + length), of which `num_embeds` take an
    embedding."""

    modality: str
    mm_hash: str
    offset: int
    length: int
    num_embeds: int


class RenderResponse(BaseModel):
    """The engine's input. Items that truncation removed are absent."""

    prompt_token_ids: list[int]
    items: list[RenderedItem]
    max_model_len: int
