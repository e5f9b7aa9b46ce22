"""Chooses the sequences that decode in a step, if several tenants have some, so that each tenant gets its share.

A tenant with many sequences makes steps long for all. A step therefore takes at most `number of tenants` times as long
as a step of the smallest tenant alone. If step time hardly depends on their number, as on a GPU, all decode."""

from collections import defaultdict, deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from functools import partial
from itertools import chain
from statistics import median

from raylens.llm.sequence import Sequence

_NUM_STEPS = 9
"""The median of so many steps of similar size counts, because other processes slow down single steps."""
_ALONE_PERIOD, _LARGER_PERIOD = 64, 16
"""After so many limited steps, one step measures the smallest tenant alone, or more sequences than the limit
allows."""


class TenantShare:
    """Report the duration of each decode-only step to `note`."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=_NUM_STEPS))
        """Of the latest steps, by the bit length of their number of sequences."""
        self._num_limited = 0
        self._order: list[Sequence] = []
        """The decoding sequences, in descending order of their waiting time."""

    def note(self, num_decodes: int, seconds: float) -> None:
        self._seconds[num_decodes.bit_length()].append(seconds)

    def choose(self, ready: Seq[Sequence], beside: Collection[str]) -> list[Sequence]:
        """Returns the sequences of `ready` that decode in the next step. If a tenant exceeds its share, its longest
        waiting sequences go first. `beside`: the tenants with prompts for this step."""
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
        """Returns the number of sequences of each tenant that decode. 0: only the first tenant decodes. `numbers`: of
        the tenants' sequences, ascending. A tenant with only a prompt counts as one. Steps with prompts measure
        nothing."""
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
