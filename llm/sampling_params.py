"""How one request wants its tokens chosen and when it wants to stop."""

from dataclasses import dataclass

from preprocess.schema import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; `max_tokens` None runs to the context's end.

    `temperature`, `top_p` and `top_k` of None take the model's own defaults (its generation config).
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        if self.max_tokens is not None:
            _check(self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens", self.min_tokens)
        if self.temperature is not None:
            _check(0.0 <= self.temperature <= 2.0, "temperature", "between 0 and 2", self.temperature)
        if self.top_p is not None:
            _check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        if self.top_k is not None:
            _check(self.top_k >= 0, "top_k", "at least 0 (0 is off)", self.top_k)
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer", self.seed)
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", len(self.stop))
        for text in self.stop:
            _check(
                0 < len(text) <= MAX_STOP_CHARS,
                "stop",
                f"strings of 1 to {MAX_STOP_CHARS} characters",
                len(text),
            )


def _check(holds: bool, field: str, limit: str, value: object) -> None:
    if not holds:
        raise InvalidRequestError(f"must be {limit}, got {value}", field=field)
