"""Turns the pieces of a completion's answers into one body or into chunks."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from raylens.deployments.api.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from raylens.deployments.endpoint.accounting import RequestAccount, usage_so_far
from raylens.deployments.endpoint.answer import Chunks, Pieces, sent_event
from raylens.deployments.endpoint.chat_answer import finite, token_text
from raylens.deployments.stages.pieces import CharacterStarts
from raylens.deployments.wire.stage_messages import GeneratedText, ScoredToken


@dataclass(slots=True)
class _Choice:
    """The state of one answer. `echo_length`: the characters of the echoed prompt."""

    echo_length: int = 0
    has_begun: bool = False


class CompletionAnswer(Chunks):
    """See `Answer`. `echoes`: the text of each prompt, or None without `echo`."""

    def __init__(self, body: CompletionRequest, account: RequestAccount, echoes: Sequence[str] | None) -> None:
        self._body = body
        self._account = account
        self._echoes = echoes
        self._choices = [_Choice() for _ in range(account.num_answers * len(account.requests))]
        self._scored_prompts: dict[int, list[ScoredToken]] = {}
        """The tokens of each echoed prompt. They come with the first piece of the prompt's first answer, before its
        other answers."""

    async def complete(self, pieces: Pieces) -> Completion:
        parts: dict[int, list[CompletionChoice]] = {}
        async for ready in pieces:
            for piece in ready:
                parts.setdefault(piece.index, []).append(self._part(piece))
        completion = self._completion([_joined(parts[index]) for index in sorted(parts)])
        completion.usage = self._account.usage
        if self._body.stage_timings:
            completion.stage_timings = self._account.timings()
        return completion

    async def events(self, pieces: Pieces) -> AsyncIterator[str]:
        async for ready in pieces:
            yield "".join(map(self._event, ready))
        if self._body.includes_usage:
            usage = self._completion([])
            usage.usage = self._account.usage
            yield sent_event(usage)

    def _event(self, piece: GeneratedText) -> str:
        event = self._completion([self._part(piece)])
        if piece.finish_reason is not None and self._body.stage_timings:
            event.stage_timings = self._account.timings()
        if self._body.tells_usage_always:
            event.usage = usage_so_far(piece, piece.num_output_tokens)
        return sent_event(event)

    def _part(self, piece: GeneratedText) -> CompletionChoice:
        """Returns the piece as a part of its choice. The first part begins with the echo."""
        choice = self._choices[piece.index]
        number = piece.index // self._account.num_answers
        echo = "" if self._echoes is None or choice.has_begun else self._echoes[number]
        part = CompletionChoice(index=piece.index, text=echo + piece.text, finish_reason=piece.finish_reason)
        if self._body.logprobs is not None:
            of_prompt = self._scored_prompts.setdefault(number, piece.prompt_logprobs) if echo else []
            part.logprobs = _logprobs(of_prompt, _offsets_in(echo, of_prompt))
            choice.echo_length += len(echo)
            offsets = [choice.echo_length + token.offset for token in piece.logprobs]
            _append(part.logprobs, _logprobs(piece.logprobs, offsets))
        if self._body.return_token_ids:
            part.token_ids = piece.token_ids
            part.prompt_token_ids = None if choice.has_begun else self._account.requests[number].trace.prompt_token_ids
        choice.has_begun = True
        return part

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        account = self._account
        return Completion(id=account.request_id, created=account.created, model=self._body.model, choices=choices)


def _logprobs(tokens: Sequence[ScoredToken], offsets: Sequence[int]) -> CompletionLogprobs:
    """Returns the wire form. `offsets`: the position of each token in the answer's text, in characters."""
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(offsets))
    for token in tokens:
        text = token_text(token.content)
        found.tokens.append(text)
        if token.logprob is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        top = {token_text(content): finite(logprob) for content, logprob in token.top}
        found.token_logprobs.append(finite(token.logprob))
        found.top_logprobs.append({**top, text: finite(token.logprob)})
    return found


def _offsets_in(echo: str, tokens: Sequence[ScoredToken]) -> list[int]:
    """Returns the position of each token in the client's prompt text. Tokens that are not in that text have no width:
    special tokens, and all but one of each item's tokens."""
    position, offsets, starts = 0, list[int](), CharacterStarts()
    for token in tokens:
        before = position - starts.num_chars
        start, text = starts.feed(token.content)
        offsets.append(before + start)
        if echo.startswith(text, position):
            position += len(text)
        elif echo.startswith(text.lstrip(), position):  # some tokenizers prepend a space
            position += len(text.lstrip())
    return offsets


def _append(found: CompletionLogprobs, more: CompletionLogprobs) -> None:
    found.tokens += more.tokens
    found.token_logprobs += more.token_logprobs
    found.top_logprobs += more.top_logprobs
    found.text_offset += more.text_offset


def _joined(parts: Sequence[CompletionChoice]) -> CompletionChoice:
    """Joins the parts of one choice."""
    whole = parts[0].model_copy(deep=True)
    for part in parts[1:]:
        whole.text += part.text
        whole.finish_reason = part.finish_reason
        if whole.token_ids is not None:
            whole.token_ids += part.token_ids or []
        if whole.logprobs is not None and part.logprobs is not None:
            _append(whole.logprobs, part.logprobs)
    return whole
