"""Requests whose answer is a vector or a number: `/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/classify`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, BaseModel, Discriminator, Field, Tag, model_validator

from raylens.deployments.api.content import ContentPart, ImagePart, MediaPart, TextPart, template_content
from raylens.deployments.api.messages import Messages, Parts, TemplateFields
from raylens.deployments.api.prompt_fields import PromptAndMedia, PromptFields
from raylens.deployments.api.prompts import TokenIds
from raylens.deployments.api.wire import Accepted, NotDone, OrAbsent, WireModel
from raylens.deployments.pipeline.media_source import UPLOAD_SCHEME
from raylens.preprocess.data_url import is_data_url
from raylens.preprocess.schema import InvalidRequestError, PooledPrompt, TokensPrompt, parts_of

_PURPOSES = {"query": "query", "document": "document", "search_query": "query", "search_document": "document"} | {
    "retrieval.query": "query",
    "retrieval.passage": "document",
}
MAX_INPUTS = 2048
"""OpenAI's limit of inputs in one request."""


class Entry(WireModel):
    """A text, a picture, or parts of a message. `text` and `image` are Jina's form: a picture's URL, or its bytes in
    base64. `content` is Cohere's and vLLM's."""

    text: str | None = None
    image: str | None = None
    content: Parts | None = None

    @model_validator(mode="after")
    def _is_something(self) -> Self:
        if (self.content is None) == (self.text is None and self.image is None):
            raise ValueError("needs either content, or text, image or both")
        return self

    def parts(self, field: str) -> "Content":
        if self.content is not None:
            return _named(self.content, f"{field}.content")
        parts: Content = []
        if self.image is not None:
            parts.append((ImagePart(type="image_url", image_url={"url": _as_url(self.image)}), f"{field}.image"))
        if self.text is not None:
            parts.append((TextPart(type="text", text=self.text), field))
        return parts


AnyEntry = str | Entry
Content = list[tuple[ContentPart, str]]
"""The parts of an input, each with the client's name for it."""


def _as_url(image: str) -> str:
    is_url = is_data_url(image) or "://" in image[:16] or image.startswith(UPLOAD_SCHEME)
    return image if is_url else f"data:;base64,{image}"


def _named(parts: Parts, field: str) -> Content:
    return [(part, f"{field}[{number}].{part.type}") for number, part in enumerate(parts)]


def _content_of(entry: AnyEntry, field: str) -> Content:
    return [(TextPart(type="text", text=entry), field)] if isinstance(entry, str) else entry.parts(field)


def _contents_of(entries: Sequence[AnyEntry], field: str) -> list[Content]:
    return [_content_of(entry, f"{field}[{index}]") for index, entry in enumerate(entries)]


def _template_form(content: Content) -> list[dict[str, str]]:
    """Returns the parts in the form of `raylens.preprocess.schema.Message`."""
    return parts_of({"content": template_content([part for part, _ in content])})


def document_text(content: Content) -> str | None:
    """Returns the text of a document, or None if it has media."""
    texts = [part.text for part, _ in content if isinstance(part, TextPart)]
    return "".join(texts) if len(texts) == len(content) else None


def _form(value: object) -> str:
    """See `prompts._form`."""
    if not isinstance(value, list):
        return "one input"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "lists of ids"
    return "token ids" if isinstance(first, int) else "several inputs"


_Several = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
Inputs = Annotated[
    Annotated[AnyEntry, Tag("one input")]
    | Annotated[TokenIds, Tag("token ids")]
    | Annotated[list[AnyEntry], _Several, Tag("several inputs")]
    | Annotated[list[TokenIds], _Several, Tag("lists of ids")],
    Discriminator(_form),
]
Entries = Annotated[list[AnyEntry], _Several]


class PooledFields(PromptFields):
    """The fields that these APIs share. Those with a single value are vLLM's, for what this server always does."""

    most_at_once: ClassVar[int] = 16

    instruction: str | None = Field(None, description="what the model shall look for, in place of its own instruction")
    add_special_tokens: Literal[True] | None = None
    normalize: Literal[True] | None = None
    use_activation: Literal[True] | None = None
    softmax: Literal[True] | None = None
    activation: Literal[True] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    metadata: Accepted = None

    def pooled(self, content: Content, query: Content | None = None, purpose: str | None = None) -> PromptAndMedia:
        """Returns the prompt of an input, or of a document for a `query`, with its media."""
        media = [part.source(name) for part, name in (*(query or ()), *content) if isinstance(part, MediaPart)]
        own = None if query is None else _template_form(query)
        return PooledPrompt(_template_form(content), own, purpose, self.instruction), media


class InputFields(PooledFields, TemplateFields):
    """One input or several, or a conversation."""

    input: Inputs | None = None
    messages: Messages | None = None
    input_type: Literal["query", "document", "search_query", "search_document"] | None = Field(
        None, description="what the input is for, where the model tells queries from documents"
    )
    task: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Jina's name for the same: retrieval.query or retrieval.passage"
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ValueError("needs either input or messages")
        return self

    @property
    def field_names(self) -> Mapping[str, str]:
        return {"prompt": "input"}

    def prompts_and_media(self) -> list[PromptAndMedia]:
        """Returns each input's prompt and its media. Raises InvalidRequestError."""
        if self.messages is not None:
            # Other servers' default: without the start of an answer.
            self.add_generation_prompt = bool(self.add_generation_prompt)
            return [self.chat_and_media(self.messages)]
        given: Any = self.input
        match _form(given):
            case "token ids":
                return [(TokensPrompt(given), [])]
            case "lists of ids":
                return [(TokensPrompt(ids), []) for ids in given]
        purpose = _PURPOSES.get(self.input_type or self.task or "")
        contents = _contents_of(given, "input") if isinstance(given, list) else [_content_of(given, "input")]
        return [self.pooled(one, purpose=purpose) for one in contents]


class EmbeddingsRequest(InputFields):
    """A vector for each input. A model with a vector for each token returns all of them."""

    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: little-endian float32, the vectors of one input one after the other"
    )
    dimensions: int | None = Field(
        None, ge=1, description="the first so many numbers of each vector; for models that were trained for that"
    )


class ClassifyRequest(InputFields):
    """The class of each input."""


class DocumentParts(WireModel):
    """vLLM's form of several documents that are media: each part is one."""

    content: Parts


class RelevanceFields(PooledFields):
    """Documents and the queries that they are compared with: one for all, or one for each."""

    @property
    def field_names(self) -> Mapping[str, str]:
        return {"prompt": "documents", "input": "documents", "messages": "documents"}

    @property
    def query_contents(self) -> list[Content]:
        """The parts of each query."""
        raise NotImplementedError

    @property
    def contents(self) -> list[Content]:
        """The parts of each document. Raises InvalidRequestError if queries and documents do not go together."""
        raise NotImplementedError

    def pairs(self) -> list[PromptAndMedia]:
        """Returns the prompt of each document together with its query. Raises like `contents`."""
        queries, documents = self.query_contents, self.contents
        queries *= len(documents) if len(queries) == 1 else 1
        return [self.pooled(*pair) for pair in zip(documents, queries, strict=True)]

    def singles(self) -> list[PromptAndMedia]:
        """Returns the prompts of all queries, and then of all documents. Raises like `contents`."""
        queries = [self.pooled(one, purpose="query") for one in self.query_contents]
        return [*queries, *(self.pooled(one, purpose="document") for one in self.contents)]


class RerankRequest(RelevanceFields):
    """The documents, by their relevance for a query."""

    query: AnyEntry
    documents: Entries | DocumentParts
    top_n: int | None = Field(None, ge=0, description="so many documents at most; 0: all")
    return_documents: bool = Field(True, description="add each document that is a text")
    max_tokens_per_doc: NotDone = None
    max_chunks_per_doc: NotDone = None
    rank_fields: NotDone = None

    @property
    def query_contents(self) -> list[Content]:
        return [_content_of(self.query, "query")]

    @property
    def contents(self) -> list[Content]:
        if isinstance(self.documents, DocumentParts):
            return [[part] for part in _named(self.documents.content, "documents.content")]
        return _contents_of(self.documents, "documents")


class ScoreRequest(RelevanceFields):
    """The relevance of texts for each other: one with all others, or each with its counterpart."""

    queries: AnyEntry | Entries = Field(validation_alias=AliasChoices("queries", "text_1", "data_1"))
    documents: AnyEntry | Entries = Field(validation_alias=AliasChoices("documents", "items", "text_2", "data_2"))

    @property
    def query_contents(self) -> list[Content]:
        return _contents_of(self.queries if isinstance(self.queries, list) else [self.queries], "queries")

    @property
    def contents(self) -> list[Content]:
        documents = self.documents if isinstance(self.documents, list) else [self.documents]
        if (number := len(self.query_contents)) not in (1, len(documents)):
            reason = f"{len(documents)} documents for {number} queries: send one query, or one for each document"
            raise InvalidRequestError(reason, field="documents")
        return _contents_of(documents, "documents")


class PooledUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """`embedding`: numbers, or lists of numbers of a model with a vector for each token, or base64. `shape`: of such a
    model, the number of vectors and their size."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | list[list[float]] | str
    shape: OrAbsent[list[int]] = None


class Embeddings(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PooledUsage


class RankedDocument(BaseModel):
    text: str


class RankedResult(BaseModel):
    index: int
    relevance_score: float
    document: OrAbsent[RankedDocument] = None


class Ranking(BaseModel):
    """The most relevant document first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: PooledUsage


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class Classification(BaseModel):
    """`probs`: of all classes, in the order of the model's labels. `label`: of the likeliest one."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PooledUsage
