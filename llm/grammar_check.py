"""Whether a grammar can be compiled and followed within bounds, found out in a process of its own.

A few hundred bytes of a client's can ask for minutes of compiling, for all memory, or for a stack that overflows, and
nothing ends a thread. So the first to compile a grammar is a child process: the kernel ends it at its bounds, and the
next grammar gets another one. Its import is light: no torch, no transformers.
"""

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

from llguidance import LLMatcher, LLTokenizer

from llm.grammar_source import GrammarError, check, make_matcher

MAX_SECONDS = 2.0
MAX_MEMORY_BYTES = 1 << 30
NUM_TOKENS = 64
"""A grammar is followed for so many tokens: some only show then that they cannot be, or what they cost."""

# Decoding goes first where both want a processor.
NICENESS = 5
_TOO_LONG = f"must be simpler: to compile and follow it for {NUM_TOKENS} tokens took more than {MAX_SECONDS:g} s"
_TOO_LARGE = f"must be simpler: to compile it took more than {MAX_MEMORY_BYTES >> 20} MiB, or is nested too deeply"
_REASONS = {signal.SIGPROF: _TOO_LONG, signal.SIGABRT: _TOO_LARGE, signal.SIGSEGV: _TOO_LARGE}


class GrammarCheck:
    """For one tokenizer. Any thread may use it; one grammar is checked at a time."""

    def __init__(self, tokenizer: Callable[[], Mapping[str, Any]]) -> None:
        """`tokenizer`: see `ByteTokenizer.arguments`. Asked for with every child, as it may take megabytes."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def reason_against(self, field: str, text: str) -> str | None:
        """Why this `StructuredOutput.specification` is refused, None where it is not.

        Raises what the tokenizer raises, and RuntimeError when the child ends for a reason that has nothing to do with
        the grammar.
        """
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
            [sys.executable, "-m", "llm.grammar_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what the library says as it gives up, of a client's grammar
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        weakref.finalize(self, _end, child)
        if _ask(child, tokenizer) is None:
            raise RuntimeError(f"the process that checks grammars could not start: status {child.wait()}")
        return child


def _ask(child: "subprocess.Popen[str]", question: object) -> str | None:
    """The child's next line; None when it has ended."""
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
    """The child: a tokenizer, then grammars, by standard input, a line of JSON each. Each has a line for an answer."""
    os.nice(NICENESS)
    tokenizer = LLTokenizer(**json.loads(sys.stdin.readline()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MAX_MEMORY_BYTES,) * 2)
    print("null", flush=True)
    for line in sys.stdin:
        # Counts the process's own time, whatever else runs on the machine; the signal's default is to end it.
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
    """Takes tokens that are allowed, by a chance that is the same every time, and goes on as long as it can."""
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
    """A token whose bit is set, bit i % 8 of byte i // 8; at least one is."""
    start = chance.randrange(len(mask))
    byte = next(place % len(mask) for place in range(start, start + len(mask)) if mask[place % len(mask)])
    return 8 * byte + chance.choice([bit for bit in range(8) if mask[byte] >> bit & 1])


def _address_space() -> int:
    """What this process has mapped, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
