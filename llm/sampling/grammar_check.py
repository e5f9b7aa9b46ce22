"""Makes llguidance's matchers, and checks before, in a child process, whether a grammar can be compiled and followed
within bounds.

A grammar of a few hundred bytes can take minutes to compile, exhaust memory, or overflow the stack, and a thread that
compiles it cannot be stopped. A child process therefore compiles each new grammar first. The kernel limits the child's
time and memory. The next grammar gets a new child if the limits ended the last one. The child imports neither torch nor
transformers, so that it starts fast."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

MAX_SECONDS = 2.0
MAX_MEMORY_BYTES = 1 << 30
NUM_TOKENS = 64
"""The check follows a grammar this far, because some grammars fail, or become slow, only after several tokens."""
NICENESS = 5
"""Decoding takes precedence over this process."""
_TOO_LONG = f"must be simpler: to compile and follow it for {NUM_TOKENS} tokens took more than {MAX_SECONDS:g} s"
_TOO_LARGE = f"must be simpler: to compile it took more than {MAX_MEMORY_BYTES >> 20} MiB, or is nested too deeply"
_REASONS = {signal.SIGPROF: _TOO_LONG, signal.SIGABRT: _TOO_LARGE, signal.SIGSEGV: _TOO_LARGE}

_MAX_REASON_CHARS = 300
# Whitespace is bounded, so that an unsure model does not fill its answer with it.
_JSON_WHITESPACE = r"[ \n\r\t]{0,16}"


class GrammarError(ValueError):
    """A grammar cannot be compiled or followed. The message is the reason in one line."""


def make_matcher(tokenizer: LLTokenizer, field: str, text: str) -> LLMatcher:
    """Compiles one `StructuredOutput.specification` and returns its matcher. Raises GrammarError. Much of the work
    happens in the matcher's first mask. Both this call and the mask release the GIL."""
    try:
        # Errors go to a client and to logs, so they must not hold the parser's state.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, _grammar(field, text), log_level=0, limits=limits)
    except ValueError as error:
        raise GrammarError(_reason(str(error))) from error
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raises GrammarError if the matcher has failed. A failed matcher never recovers."""
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))


def _reason(error: str) -> str:
    """Returns the first line of the library's error, cut to `_MAX_REASON_CHARS`. An error with only a name becomes
    plain words."""
    line = error.strip().split("\n")[0][:_MAX_REASON_CHARS]
    return "no text matches it" if line == "NoExtensionBias" else line


def _grammar(field: str, text: str) -> str:
    if field in ("json_schema", "json_object"):
        return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": _JSON_WHITESPACE})
    if field == "regex":
        # \d and \w match ASCII only, as in JavaScript and JSON Schema.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dw')}/")
    if field == "choice":
        return grammar_from("choice", text)
    return grammar_from("grammar", text)


class GrammarCheck:
    """Checks grammars for one tokenizer, one at a time. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], Mapping[str, Any]]) -> None:
        """`tokenizer`: `ByteTokenizer.arguments`. Called once for each child; the result, possibly megabytes, is not
        kept."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def reason_against(self, field: str, text: str) -> str | None:
        """Returns the reason to reject this `StructuredOutput.specification`, or None. Raises the tokenizer's errors,
        and RuntimeError if the child ends for a reason unrelated to the grammar."""
        with self._lock:
            if self._child is None:
                self._child = self._start()
            reply = _ask(self._child, [field, text])
            if reply is not None:
                reason: str | None = json.loads(reply)
                return reason
            status = self._child.wait()
            self._child = None
        if -status not in _REASONS:
            raise RuntimeError(f"the process that checks grammars ended with status {status}")
        return _REASONS[signal.Signals(-status)]

    def _start(self) -> subprocess.Popen[str]:
        tokenizer = self._tokenizer()
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "raylens.llm.sampling.grammar_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the library's abort messages quote the client's grammar
            text=True,
        )
        weakref.finalize(self, _end, child)
        if _ask(child, tokenizer) is None:
            raise RuntimeError(f"the process that checks grammars could not start: status {child.wait()}")
        return child


def _ask(child: "subprocess.Popen[str]", question: object) -> str | None:
    """Sends the child a line of JSON and returns its answer, one line, or None if it has ended."""
    assert child.stdin is not None, "a pipe"
    assert child.stdout is not None, "a pipe"
    try:
        child.stdin.write(json.dumps(question) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    return child.stdout.readline() or None


def _end(child: "subprocess.Popen[str]") -> None:
    child.kill()
    child.communicate()


def main() -> None:
    """Runs the child. It reads a tokenizer and then grammars from standard input, and answers each on standard output:
    a line of JSON for each message."""
    os.nice(NICENESS)
    tokenizer = LLTokenizer(**json.loads(sys.stdin.readline()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (address_space + MAX_MEMORY_BYTES,) * 2)
    print("null", flush=True)
    for line in sys.stdin:
        # The timer counts this process's CPU time. Its signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        reason = _reason_against(tokenizer, *json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reason), flush=True)


def _reason_against(tokenizer: LLTokenizer, field: str, text: str) -> str | None:
    try:
        _follow(make_matcher(tokenizer, field, text), tokenizer.eos_tokens)
    except GrammarError as error:
        return f"must be one that can be compiled and followed, got: {error}"
    except MemoryError:
        return _TOO_LARGE
    return None


def _follow(matcher: LLMatcher, eos_tokens: Sequence[int]) -> None:
    """Consumes up to `NUM_TOKENS` allowed tokens, drawn with a fixed seed, until only an end token may follow. Raises
    GrammarError if the grammar fails."""
    chance = random.Random(0)
    for _ in range(NUM_TOKENS):
        mask = bytearray(matcher.compute_bitmask())
        check(matcher)
        for token_id in eos_tokens:
            mask[token_id // 8] &= ~(1 << token_id % 8)
        if not any(mask):
            return
        matcher.consume_token(_some_token(mask, chance))
        check(matcher)


def _some_token(mask: bytearray, chance: random.Random) -> int:
    """Returns a random token with a set bit in `mask`. Token i is bit i % 8 of byte i // 8; at least one bit is
    set."""
    start = chance.randrange(len(mask))
    byte = next(place % len(mask) for place in range(start, start + len(mask)) if mask[place % len(mask)])
    return 8 * byte + chance.choice([bit for bit in range(8) if mask[byte] >> bit & 1])


if __name__ == "__main__":
    main()
