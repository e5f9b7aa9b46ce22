"""Turns the pieces of a completion's answers into one body or into chunks."""

from collections.abc import Iterator, Sequence

from raylens.deployments.api.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.answer import ChunkedAnswer, finite
from raylens.deployments.stages.pieces import CharacterStarts
from raylens.deployments.wire.stage_messages import GeneratedText, ScoredToken


class CompletionAnswer(ChunkedAnswer[Completion]):
    """`echoes`: the text of each prompt, or None without `echo`."""

    def __init__(self, body: CompletionRequest, account: RequestAccount, echoes: Sequence[str] | None) -> None:
        super().__init__(body, account, Completion)
        self._has_logprobs = body.logprobs is not None
        self._has_token_ids = body.return_token_ids
        self._echoes = echoes
        self._choices: dict[int, CompletionChoice] = {}
        self._echo_lengths: dict[int, int] = {}
        """The characters of the echoed prompt, by answer that has begun."""
        self._scored_prompts: dict[int, list[ScoredToken]] = {}
        """The tokens of each echoed prompt. They come with the first piece of the prompt's first answer."""

    def add(self, pieces: Sequence[GeneratedText]) -> None:
        for piece in pieces:
            part = self._part(piece)
            if (choice := self._choices.setdefault(piece.index, part)) is not part:
                _extend(choice, part)

    def whole(self) -> Completion:
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self._chunk(choices, usage=self._account.usage, stage_timings=self._timings())

    def _chunks_of(self, piece: GeneratedText) -> Iterator[Completion]:
        timings = None if piece.finish_reason is None else self._timings()
        usage = self._usage(piece, piece.num_output_tokens)
        yield self._chunk([self._part(piece)], usage=usage, stage_timings=timings)

    def _part(self, piece: GeneratedText) -> CompletionChoice:
        """Returns the piece as a part of its choice. The first part begins with the echo."""
        index, number = piece.index, piece.index // self._account.num_answers
        is_first = index not in self._echo_lengths
        echo = self._echoes[number] if self._echoes is not None and is_first else ""
        echo_length = self._echo_lengths.setdefault(index, len(echo))
        logprobs = token_ids = prompt_token_ids = None
        scored_prompt = self._scored_prompts.setdefault(number, piece.prompt_logprobs) if is_first else []
        if self._has_logprobs:
            of_prompt = scored_prompt if echo else []
            offsets = [echo_length + token.offset for token in piece.logprobs]
            logprobs = self._logprobs([*of_prompt, *piece.logprobs], _offsets_in(echo, of_prompt) + offsets)
        if self._has_token_ids:
            token_ids = piece.token_ids
            prompt_token_ids = self._account.requests[number].trace.prompt_token_ids if is_first else None
        return CompletionChoice(
            index=index,
            text=echo + piece.text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            token_ids=token_ids,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(scored_prompt) if is_first else None,
        )

    def _logprobs(self, tokens: Sequence[ScoredToken], offsets: list[int]) -> CompletionLogprobs:
        """Returns the wire form. `offsets`: the position of each token in the answer's text, in characters."""
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=offsets)
        for token in tokens:
            name, logprob = self._token_name(token.token_id, token.content), token.logprob
            logprob = None if logprob is None else finite(logprob)
            top = {self._token_name(token_id, content): finite(value) for token_id, content, value in token.top}
            found.tokens.append(name)
            found.token_logprobs.append(logprob)
            found.top_logprobs.append(None if logprob is None else {**top, name: logprob})
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


def _extend(whole: CompletionChoice, part: CompletionChoice) -> None:
    whole.text += part.text
    whole.finish_reason = part.finish_reason
    if whole.token_ids is not None:
        whole.token_ids += part.token_ids or []
    if whole.logprobs is not None and part.logprobs is not None:
        for name in CompletionLogprobs.model_fields:
            getattr(whole.logprobs, name).extend(getattr(part.logprobs, name))
