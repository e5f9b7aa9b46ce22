"""The turns of a conversation in Anthropic's Messages API, and the blocks of their content."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from raylens.deployments.api.content import MediaPart, Part, SaidPart, TextPart, Url, template_content
from raylens.deployments.api.messages import thought_form
from raylens.deployments.api.tools import FunctionName, call_form, flat_enough
from raylens.deployments.api.wire import Accepted, Name, WireModel
from raylens.deployments.pipeline.media_source import MediaSource, upload_url
from raylens.preprocess.schema import Message


class Base64Source(WireModel):
    type: Literal["base64"]
    media_type: Annotated[str, Field(max_length=100)]
    data: str


class UrlSource(WireModel):
    type: Literal["url"]
    url: Url


class FileSource(WireModel):
    type: Literal["file"]
    file_id: Name


class _OriginBlock(MediaPart):
    origin: Annotated[Base64Source | UrlSource | FileSource, Field(alias="source", discriminator="type")]

    @property
    def url(self) -> str:
        match self.origin:
            case Base64Source():
                return f"data:{self.origin.media_type};base64,{self.origin.data}"
            case UrlSource():
                return self.origin.url
            case FileSource():
                return upload_url(self.origin.file_id)


class ImageBlock(_OriginBlock):
    type: Literal["image"]


class DocumentBlock(_OriginBlock):
    """A PDF, whose pages are pictures."""

    modality = "document"
    type: Literal["document"]
    title: Accepted = None
    context: Accepted = None
    citations: Accepted = None


class TextBlock(TextPart):
    citations: Accepted = None


class SearchResultBlock(Part):
    """What a source says that the client has found."""

    type: Literal["search_result"]
    title: str
    source: str
    content: Annotated[list[TextBlock], Field(max_length=10_000, fail_fast=True)]
    citations: Accepted = None

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content), ""])


class ToolReferenceBlock(Part):
    """A deferred tool that the client has found for the model, which may call it from now on."""

    type: Literal["tool_reference"]
    tool_name: FunctionName

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} was found.\n"


class NamedTool(WireModel):
    type: Literal["tool_reference"]
    name: FunctionName


class ToolChangeBlock(WireModel):
    """Offers a deferred tool, or withdraws one."""

    type: Literal["tool_addition", "tool_removal"]
    tool: NamedTool
    cache_control: Accepted = None


_Block = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")
]
Blocks = Annotated[list[_Block], Field(max_length=10_000, fail_fast=True)]


class ToolResultBlock(WireModel):
    """The result of a tool call. `is_error`: the text says so itself."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Blocks = ""
    is_error: Accepted = None
    cache_control: Accepted = None


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    input: Annotated[dict[str, Any], AfterValidator(flat_enough)]
    cache_control: Accepted = None


class ThinkingBlock(WireModel):
    """Earlier thoughts. `signature`: of another server."""

    type: Literal["thinking"]
    thinking: str
    signature: Accepted = None


class RedactedThinkingBlock(WireModel):
    """Thoughts that another server encrypted. They are ignored."""

    type: Literal["redacted_thinking"]
    data: Accepted = None


Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolResultBlock
    | ToolUseBlock
    | ToolChangeBlock
    | ThinkingBlock
    | RedactedThinkingBlock,
    Field(discriminator="type"),
]

_ROLES = {
    "tool_result": "user",
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
}
"""Of blocks that only one role has."""


class Turn(WireModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=10_000, fail_fast=True)]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> Self:
        for block in () if isinstance(self.content, str) else self.content:
            role = _ROLES.get(block.type, self.role)
            if role != self.role:
                raise ValueError(f"{block.type} may stand in messages of role {role} only")
        return self

    def template_forms(self) -> Iterator[Message]:
        """Yields the messages for chat templates. Results of tools come before what a user says."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        blocks = self.content
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        for one in results:
            yield {"role": "tool", "tool_call_id": one.tool_use_id, "content": template_content(one.content)}
        said: list[SaidPart | MediaPart] = [
            block for block in blocks if isinstance(block, TextBlock | SearchResultBlock | MediaPart)
        ]
        thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        message: Message = {"role": self.role, **thought_form(thought)}
        if calls := [block for block in blocks if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = [call_form(call.id, call.name, call.input) for call in calls]
        if said or not calls:
            message["content"] = template_content(said)
        if not blocks or any(not isinstance(block, ToolResultBlock | ToolChangeBlock) for block in blocks):
            yield message

    def tool_changes(self) -> Iterator[tuple[str, bool]]:
        """Yields names of tools, each with whether the model may call it from now on."""
        for block in () if isinstance(self.content, str) else self.content:
            if isinstance(block, ToolChangeBlock):
                yield block.tool.name, block.type == "tool_addition"
            elif isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                yield from ((one.tool_name, True) for one in block.content if isinstance(one, ToolReferenceBlock))

    def media(self, field: str) -> list[MediaSource]:
        """Returns the pictures and documents, in the order of `template_forms`. `field`: the client's name for the
        message."""
        if isinstance(self.content, str):
            return []
        found = list[MediaSource]()
        for number, block in enumerate(self.content):
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                found += _media_of(block.content, f"{field}.content[{number}]")
        return found + _media_of(self.content, field)


def _media_of(blocks: Sequence[object], field: str) -> list[MediaSource]:
    return [
        block.source(f"{field}.content[{number}].{block.type}")
        for number, block in enumerate(blocks)
        if isinstance(block, MediaPart)
    ]
