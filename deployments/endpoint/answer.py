"""Server-sent events, and the common part of chat completions and completions."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from raylens.deployments.api.chat import ChatCompletionChunk, ChatCompletionRequest
from raylens.deployments.api.completions import Completion, CompletionRequest
from raylens.deployments.api.generation import StreamOptions
from raylens.deployments.api.wire import ErrorResponse, PromptLogprob, PromptLogprobs, StageTimings, Usage
from raylens.deployments.endpoint.accounting import RequestAccount, usage_of
from raylens.deployments.wire.stage_messages import GeneratedText, ScoredToken

ChunkT = TypeVar("ChunkT", ChatCompletionChunk, Completion)


def sent_event(data: BaseModel, name: str | None = None) -> str:
    """Returns a server-sent event; see https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data.model_dump_json()}\n\n"


_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


def token_text(content: bytes) -> str:
    """Returns a token's bytes as text. Incomplete characters become replacement characters."""
    return content.decode(errors="replace")


def finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


class ChunkedAnswer(Generic[ChunkT]):
    """Formats the pieces of one request's answers as chunks. The account has already counted the pieces."""

    last_event = "data: [DONE]\n\n"

    def __init__(
        self, body: ChatCompletionRequest | CompletionRequest, account: RequestAccount, chunk_type: type[ChunkT]
    ) -> None:
        self._account = account
        self._head: dict[str, Any] = {"id": account.request_id, "created": account.created, "model": account.model}
        self._chunk_type: type[ChunkT] = chunk_type
        self._options = body.stream_options or StreamOptions()
        self._has_timings = body.stage_timings
        self._names_ids = body.return_tokens_as_token_ids
        self._has_prompt_logprobs = body.prompt_logprobs is not None

    def first_events(self) -> str:
        return ""

    def events(self, pieces: Sequence[GeneratedText]) -> str:
        """Returns the events of pieces that are ready together. They are sent as one text, because each sending
        costs."""
        return "".join(sent_event(chunk) for piece in pieces for chunk in self._chunks_of(piece))

    def last_events(self) -> str:
        return sent_event(self._chunk([], usage=self._account.usage)) if self._options.include_usage else ""

    def error_event(self, error: ErrorResponse) -> str:
        return sent_event(error)

    def _chunks_of(self, piece: GeneratedText) -> Iterator[ChunkT]:
        raise NotImplementedError

    def _chunk(self, choices: list[Any], **fields: Any) -> ChunkT:
        return self._chunk_type(**self._head, choices=choices, **fields)

    def _usage(self, piece: GeneratedText, num_output_tokens: int) -> Usage | None:
        """Returns the usage so far, if the client asked for it in every chunk."""
        is_told = self._options.include_usage and self._options.continuous_usage_stats
        return usage_of([piece], num_output_tokens, piece.num_thought_tokens) if is_told else None

    def _timings(self) -> StageTimings | None:
        return self._account.timings() if self._has_timings else None

    def _token_name(self, token_id: int, content: bytes) -> str:
        """Returns the name of a token beside its log-probability."""
        return f"token_id:{token_id}" if self._names_ids else token_text(content)

    def _prompt_logprobs(self, tokens: Sequence[ScoredToken]) -> PromptLogprobs | None:
        """Returns vLLM's form of a prompt's scores, if the client asked for them."""
        return [_by_id(token) for token in tokens] if self._has_prompt_logprobs else None


def _by_id(token: ScoredToken) -> dict[int, PromptLogprob] | None:
    if token.logprob is None:
        return None
    own = (token.token_id, token.content, token.logprob, token.rank)
    others = [(*one, rank) for rank, one in enumerate(token.top, start=1)]
    return {
        token_id: PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=token_text(content))
        for token_id, content, logprob, rank in [own, *others]
    }
