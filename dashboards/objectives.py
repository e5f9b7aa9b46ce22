"""The promises to clients, and the requests that count as failed. The panels, the recording rules and the alerts agree
on it.

The objectives are examples to change: edit them here, then run `python -m dashboards.generate`."""

from dataclasses import dataclass

FIRST_TOKEN_SECONDS = 2.5
"""A first token that takes longer is late. It has to be a bound of the histogram's buckets."""

FAILED_CODES = (
    "[A-Z].*",  # an exception's name: nobody expected it
    "http_5..",
    "deadline_exceeded",
    "stage_unavailable",
    "plug_in_failed",
    "adapter_failed",
    "chat_template_failed",
)
"""Codes of `request_errors` that are the server's fault, as regular expressions. All others the client has to change,
but for the refusals for want of room, which `admission_rejections` counts."""
FAILED = f'code=~"{"|".join(FAILED_CODES)}"'


@dataclass(frozen=True, slots=True)
class Objective:
    """`allowed`: the share of requests that may be bad, 0 to 1. `series`: what recorded shares of bad ones are called.
    `volume`: what the recorded rates of all that count are called."""

    name: str
    allowed: float
    series: str
    volume: str

    def ratio(self, window: str) -> str:
        return f"application:{self.series}:ratio_rate{window}"

    def requests(self, window: str) -> str:
        return f"application:{self.volume}:rate{window}"


ERRORS = Objective("errors", 0.001, "raylens_failed_requests", "raylens_requests")
FIRST_TOKENS = Objective("first tokens", 0.01, "raylens_late_first_tokens", "raylens_first_tokens")

WINDOWS = ("5m", "30m", "1h", "6h")
"""The windows over which the shares of bad requests are recorded."""
