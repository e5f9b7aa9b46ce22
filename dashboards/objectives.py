"""The service-level objectives, the definition of failed requests and the address of the runbooks, for panels,
recording rules and alerts.

The objectives and the address are examples to change: edit them here, then run `python -m dashboards.generate`."""

from dataclasses import dataclass

DOCS_URL = "https://raylens.example/docs"
"""The folder `docs/` as the people on call read it. Alertmanager makes links of absolute addresses only."""

FIRST_TOKEN_SECONDS = 2.5
"""A first token that takes longer is late. This must be a bucket bound of the histogram."""

FAILED_CODES = (
    "[A-Z].*",  # the name of an unexpected exception
    "http_5..",
    "deadline_exceeded",
    "stage_unavailable",
    "plug_in_failed",
    "adapter_failed",
    "chat_template_failed",
)
"""Codes of `request_errors` that are the server's fault, as regular expressions. All others are client errors, or
refusals for want of room, which `admission_rejections` counts."""
FAILED = f'code=~"{"|".join(FAILED_CODES)}"'


@dataclass(frozen=True, slots=True)
class Objective:
    """`allowed`: the share of requests that may be bad, 0 to 1. `series`: the name of the recorded shares of bad
    requests. `volume`: the name of the recorded rates of all counted requests."""

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
"""The windows of the recorded shares of bad requests."""
