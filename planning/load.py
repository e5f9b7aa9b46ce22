"""The load of a plan: the arrival rate and the contents of requests."""

import random
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from raylens.planning.settings import PlanSettings


class LoadProfile(PlanSettings):
    """Requests that arrive at random times (a Poisson process), independent of each other."""

    requests_per_second: float = Field(gt=0, le=1e7, description="mean rate of arrivals")
    picture_share: float = Field(0.0, ge=0, le=1, description="share of the requests that have pictures")
    megapixels: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = Field(
        (1.0,), max_length=256, description="size of each picture of such a request, in 10^6 pixels"
    )
    repeated_share: float = Field(
        0.0, ge=0, le=1, description="share of the pictures whose embeddings are in the cache, because they came before"
    )
    prompt_tokens: int = Field(100, ge=1, le=10**7, description="tokens of text in a prompt, the template included")
    answer_tokens: int = Field(100, ge=1, le=10**6, description="tokens of an answer")
    lengths: Literal["fixed", "geometric"] = Field(
        "fixed", description="whether prompts and answers all have these lengths, or these means"
    )

    @model_validator(mode="after")
    def _has_pictures(self) -> "LoadProfile":
        if self.picture_share > 0 and not self.megapixels:
            raise ValueError(f"megapixels must name a picture where picture_share ({self.picture_share}) is above 0")
        return self

    @property
    def picture_rate(self) -> float:
        """Returns the requests with pictures per second."""
        return self.requests_per_second * self.picture_share

    @property
    def tokens_per_second(self) -> float:
        return self.requests_per_second * self.answer_tokens


class Slo(PlanSettings):
    """Promises to clients: percentiles of TTFT (time to first token) and of TPOT (time per output token, a request's
    mean). None: no promise."""

    ttft_p95_seconds: float | None = Field(None, gt=0, description="time to first token, 95th percentile")
    tpot_p95_seconds: float | None = Field(None, gt=0, description="time per output token, 95th percentile")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a request. `key`: selects its shard."""

    megapixels: float
    is_repeated: bool
    key: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at `moment`, in seconds. `prompt_tokens`: text only."""

    moment: float
    pictures: tuple[Picture, ...]
    prompt_tokens: int
    answer_tokens: int


def arrivals(load: LoadProfile, count: int, seed: int) -> list[Arrival]:
    """Returns `count` requests. The same seed gives the same requests; the rate changes only their times."""
    draw = random.Random(seed)
    moment, found = 0.0, []
    for _ in range(count):
        moment += draw.expovariate(1.0) / load.requests_per_second
        has_pictures = draw.random() < load.picture_share
        drawn = [(draw.random() < load.repeated_share, draw.getrandbits(32)) for _ in load.megapixels]
        pictures = tuple(Picture(size, *one) for size, one in zip(load.megapixels, drawn, strict=True))
        lengths = (_length(load, load.prompt_tokens, draw), _length(load, load.answer_tokens, draw))
        found.append(Arrival(moment, pictures if has_pictures else (), *lengths))
    return found


def _length(load: LoadProfile, mean: int, draw: random.Random) -> int:
    if load.lengths == "fixed" or mean == 1:
        return mean
    return 1 + int(draw.expovariate(1.0) * (mean - 1) + 0.5)
