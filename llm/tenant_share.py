"""Chooses which sequences decode in a step while several tenants have some, so that each gets its part of the time.

A tenant with many sequences makes every step long, also for a tenant that has one. So a step takes at most as many
times as long as there are tenants, compared with a step of the smallest tenant alone. Where the time of a step hardly
depends on the number of sequences, as on a GPU, no sequence is left out.
"""

from collections import defaultdict, deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from functools import partial
from itertools import chain
from statistics import median

from raylens.llm.sequence import Sequence

_NUM_STEPS = 9
"""Steps of about one size whose median counts: a step takes longer when the system gives its core to somebody else."""
_ALONE_PERIOD, _LARGER_PERIOD = 64, 16
"""After so many steps with a limit, the smallest tenant decodes alone, or more sequences decode than the limit allows:
both times are measured again."""


class TenantShare:
    """Tell `note` how long each step took that only decoded."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=_NUM_STEPS))
        """Of the latest steps, by the number of bits of their number of sequences."""
        self._num_limited = 0
        self._order: list[Sequence] = []
        """The decoding sequences, the one that has waited the longest first."""

    def note(self, num_decodes: int, seconds: float) -> None:
        self._seconds[num_decodes.bit_length()].append(seconds)

    def choose(self, ready: Seq[Sequence], beside: Collection[str]) -> list[Sequence]:
        """Returns the sequences of `ready` that decode in the next step. Of a tenant with more sequences than its
        share, those go first that have waited the longest. `beside`: the tenants with prompts for this step."""
        still, known = set(ready), set(self._order)
        order = [one for one in self._order if one in still] + [one for one in ready if one not in known]
        own: dict[str, list[Sequence]] = {tenant: [] for tenant in beside}
        for sequence in order:
            own.setdefault(sequence.tenant, []).append(sequence)
        tenants = sorted(own.values(), key=len)
        each = self._number_each([len(one) for one in tenants])
        chosen = dict.fromkeys(tenants[0] if each == 0 else chain.from_iterable(one[:each] for one in tenants))
        self._order = [one for one in order if one not in chosen] + list(chosen)
        return list(chosen)

    def _number_each(self, numbers: Seq[int]) -> int:
        """Returns how many sequences of each tenant decode, of tenants that have these numbers, the fewest first. 0:
        those of the first tenant alone.

        A tenant with nothing but a prompt counts as one sequence. Steps with prompts measure nothing."""
        each, most, measures = max(1, numbers[0]), numbers[-1], numbers[0] > 0
        if each == most:
            return most
        self._num_limited += measures
        alone = self._seconds.get(each.bit_length())
        if not alone or (measures and self._num_limited % _ALONE_PERIOD == 0):
            return 0 if measures else most
        limit = len(numbers) * median(alone)
        while each < most:
            larger = min(2 * each, most)
            known = self._seconds.get(sum(min(number, larger) for number in numbers).bit_length())
            is_too_slow = known is not None and median(known) > limit
            if is_too_slow and not (measures and self._num_limited % _LARGER_PERIOD == 0):
                break
            each = larger
            if is_too_slow or not known:
                break
        return each
