"""Converts the engine's outputs into pieces, one for each answer with new tokens, and sends them to the ingress."""

import codecs
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raylens.deployments.server_log import process_name
from raylens.deployments.stages.thoughts import ThoughtSplitter
from raylens.deployments.wire.piece_connection import PieceConnection
from raylens.deployments.wire.stage_messages import DECODE, GeneratedText, ScoredToken
from raylens.preprocess.schema import StageTime

if TYPE_CHECKING:
    from raylens.llm.byte_tokenizer import ByteTokenizer
    from raylens.llm.detokenizer import Detokenizer
    from raylens.llm.outputs import RequestOutput
    from raylens.llm.sampling.logprobs import TokenLogprobs


@dataclass(slots=True)
class AnswerSender:
    """Sends the answers of one Generate call, `number` at the ingress, piece by piece. `first_times` returns the stage
    times to send with the first piece. `record` makes spans of each piece's stage times."""

    connection: PieceConnection
    number: int
    num_unfinished: int
    pieces_of: "Callable[[Sequence[RequestOutput]], list[GeneratedText]]"
    first_times: Callable[[], Sequence[StageTime]] | None
    record: Callable[[Sequence[StageTime]], None]

    def receive(self, outputs: "list[RequestOutput]") -> bool:
        """Sends the next pieces. Returns whether all answers ended. Raises an output's error, PiecesLostError."""
        for output in outputs:
            if output.error is not None:
                raise output.error
        pieces = self.pieces_of(outputs)
        if self.first_times is not None:
            pieces[0].times.extend(self.first_times())
            self.first_times = None
        known: list[StageTime] = []
        for piece in pieces:
            known += piece.times
            self.num_unfinished -= piece.finish_reason is not None
        is_last = self.num_unfinished == 0
        self.connection.send(self.number, pieces, is_last=is_last)
        if known:
            self.record(known)  # after sending, off the critical path
        return is_last


class PieceMaker:
    """Makes one request's pieces, with text and tokens' bytes, because the ingress has no tokenizer."""

    def __init__(
        self,
        tokenizer: "ByteTokenizer",
        make_detokenizer: "Callable[[], Detokenizer]",
        first_prompt_token: int | None,
        *,
        includes_stop: bool = False,
        make_splitter: "Callable[[], ThoughtSplitter] | None" = None,
    ) -> None:
        """`first_prompt_token`: set if the client asks for the prompt's tokens by name. `make_splitter`: None if the
        answers have no thoughts."""
        self._tokenizer = tokenizer
        self._detokenizers: defaultdict[int, Detokenizer] = defaultdict(make_detokenizer)
        self._first_prompt_token = first_prompt_token
        self._includes_stop = includes_stop
        self._splitters = None if make_splitter is None else defaultdict[int, ThoughtSplitter](make_splitter)

    def prepare(self) -> None:
        """Loads the token names. The first call takes up to a second, later ones no time."""
        self._tokenizer.token_bytes(0)

    def __call__(self, outputs: "Sequence[RequestOutput]") -> list[GeneratedText]:
        """Merges the outputs of several steps into one piece per answer, sorted by the answers' indices."""
        if len(outputs) == 1:  # the usual case
            return [self._merge(outputs)]
        by_index: dict[int, list[RequestOutput]] = {}
        for output in outputs:
            by_index.setdefault(output.index, []).append(output)
        return [self._merge(by_index[index]) for index in sorted(by_index)]

    def _merge(self, outputs: "Sequence[RequestOutput]") -> GeneratedText:
        last, token_ids, scored = outputs[-1], outputs[-1].token_ids, outputs[-1].logprobs
        if len(outputs) > 1:
            token_ids = [token_id for output in outputs for token_id in output.token_ids]
            scored = [one for output in outputs for one in output.logprobs]
        is_beginning = last.index == 0 and last.num_output_tokens == len(token_ids)
        splitter, thought = None if self._splitters is None else self._splitters[last.index], ""
        if splitter is None or splitter.is_answering:
            text, offsets = self._text(last, token_ids, tells_offsets=bool(scored))
        else:
            thought, text = self._thought_and_text(splitter, last, token_ids)
            offsets = [0] * len(scored)  # only completions tell them, and these have no thoughts
        return GeneratedText(
            text=text,
            thought=thought,
            num_thought_tokens=0 if splitter is None else splitter.num_thought_tokens,
            stop=self._detokenizers[last.index].stopped_by,
            token_ids=token_ids,
            num_prompt_tokens=last.num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
            num_output_tokens=last.num_output_tokens,
            # A plain string: the enumeration's module imports torch, which the ingress does not need.
            finish_reason=None if last.finish_reason is None else last.finish_reason.value,
            times=_stage_times(last, len(token_ids)) if last.index == 0 else [],
            index=last.index,
            pooled=[] if last.pooled is None else [row.tobytes() for row in last.pooled.numpy()],
            logprobs=[self._scored(*one) for one in zip(scored, offsets, strict=True)] if scored else [],
            prompt_logprobs=self._prompt_logprobs(outputs[0]) if is_beginning else [],
        )

    def _prompt_logprobs(self, first: "RequestOutput") -> list[ScoredToken]:
        """Returns the prompt's scored tokens from the first answer's first output."""
        told = [self._scored(one) for one in first.prompt_logprobs]
        if (token_id := self._first_prompt_token) is None:
            return told
        return [ScoredToken(token_id, self._tokenizer.token_bytes(token_id), None, 0, []), *told]

    def _text(self, last: "RequestOutput", token_ids: list[int], *, tells_offsets: bool) -> tuple[str, list[int]]:
        """Returns the text of the next `token_ids`, up to `last`, and the index of each token's first character."""
        detokenizer, told = self._detokenizers[last.index], self._told(last, token_ids)
        text, offsets = "", list[int]()
        if tells_offsets:
            for token_id in token_ids:
                offsets.append(self._offset(last.index, token_id))
                if len(offsets) <= len(told):
                    text += detokenizer.append([token_id])
        else:
            text = detokenizer.append(told)
        if last.finish_reason is not None and not detokenizer.stopped:
            text += detokenizer.flush()
        return text, offsets

    def _thought_and_text(
        self, splitter: ThoughtSplitter, last: "RequestOutput", token_ids: list[int]
    ) -> tuple[str, str]:
        """Returns the thoughts in the next `token_ids`, up to `last`, and the text behind them."""
        detokenizer = self._detokenizers[last.index]
        parts = []
        for token_id in self._told(last, token_ids):
            text = detokenizer.append([token_id])
            is_silent = not text and not detokenizer.tells(token_id)
            parts.append(splitter.feed(splitter.tag_of(self._tokenizer.token_bytes(token_id)) if is_silent else text))
        if last.finish_reason is not None:
            parts.append(splitter.flush("" if detokenizer.stopped else detokenizer.flush()))
        return "".join(thought for thought, _ in parts), "".join(text for _, text in parts)

    def _told(self, last: "RequestOutput", token_ids: list[int]) -> list[int]:
        return token_ids[:-1] if last.has_stop_token and not self._includes_stop else token_ids

    def _offset(self, index: int, token_id: int) -> int:
        """Returns the index of the next token's first character. Counts bytes only within an incomplete character."""
        detokenizer, starts, start = self._detokenizers[index], CharacterStarts(), 0
        for one in (*detokenizer.unfinished, token_id):
            start, _ = starts.feed(self._tokenizer.token_bytes(one) if detokenizer.tells(one) else b"")
        return detokenizer.num_chars + max(0, start - detokenizer.num_chars_before)

    def _scored(self, token: "TokenLogprobs", offset: int = 0) -> ScoredToken:
        top = [(token_id, self._tokenizer.token_bytes(token_id), logprob) for token_id, logprob in token.top]
        content = self._tokenizer.token_bytes(token.token_id)
        return ScoredToken(token.token_id, content, token.logprob, token.rank, top, offset)


def _stage_times(last: "RequestOutput", num_tokens: int) -> list[StageTime]:
    """Returns the times of the stages that ended with one of the `num_tokens` tokens up to `last`."""
    first_index = last.num_output_tokens - num_tokens
    if first_index > 1 and last.finish_reason is None:  # the usual case
        return []
    moments, place = last.times, process_name()
    wall = time.time() - time.perf_counter()

    def between(stage: str, start: float, end: float) -> StageTime:
        return StageTime(stage, wall + start, end - start, place)

    times: list[StageTime] = []
    if first_index == 0 and moments.first_token is not None and moments.first_scheduled is not None:
        times.append(between("llm_queue", moments.arrival, moments.first_scheduled))
        times.append(between("prefill", moments.first_scheduled, moments.first_token))
    if moments.first_token is None or moments.second_token is None:
        return times
    if first_index <= 1 < last.num_output_tokens:
        times.append(between("first_decode", moments.first_token, moments.second_token))
    if last.finish_reason is not None:
        times.append(between(DECODE, moments.first_token, time.perf_counter()))
    return times


class CharacterStarts:
    """Decodes one text's bytes. `num_chars`: complete characters so far; invalid bytes are replacement characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_chars = 0

    def feed(self, content: bytes) -> tuple[int, str]:
        """Returns the index of the next bytes' (`content`) first character, and the text that they complete."""
        unfinished, _ = self._decoder.getstate()
        start = self.num_chars + (not _goes_on(unfinished, content))
        text = self._decoder.decode(content)
        self.num_chars += len(text)
        return start, text


def _goes_on(unfinished: bytes, content: bytes) -> bool:
    """Returns whether `content`'s first byte can continue the unfinished character, if any, or else start one."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(unfinished + content[:1])
    except UnicodeDecodeError:
        return not unfinished
    return True
