"""The progress of a training stage, and its learning rate."""

import math
import time

WARM_UP_STEPS = 100


class Pace:
    """The progress of a stage: by steps, or by time if a time limit ends it earlier."""

    def __init__(self, steps: int, minutes: float | None) -> None:
        self.steps, self.seconds = steps, (minutes or math.inf) * 60
        self.start = time.monotonic()

    def progress(self, step: int) -> float:
        return max(step / self.steps, (time.monotonic() - self.start) / self.seconds)

    def line(self, step: int, progress: float) -> str:
        elapsed = time.monotonic() - self.start
        left = elapsed * (1 - progress) / progress if progress else math.nan
        speed = f"{elapsed / max(step, 1):.2f} s/step"
        return f"step {step}/{self.steps}  {progress:4.0%}  {speed}  {left / 60:.0f} min left"


def learning_rate_share(step: int, progress: float) -> float:
    """Returns the share of the peak: a linear warm-up, then a cosine decay to 2 %."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
