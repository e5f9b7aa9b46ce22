"""Tenants get equal parts of the engine's time, whatever a step costs."""

from collections import Counter
from collections.abc import Callable

import pytest

from raylens.llm.sequence import Sequence
from raylens.llm.tenant_share import TenantShare


def sequences(tenant: str, count: int) -> list[Sequence]:
    return [Sequence(f"{tenant}{number}", [0, 0], 1, [], 1000, tenant=tenant) for number in range(count)]


def run(ready: list[Sequence], seconds_of: Callable[[int], float], num_steps: int) -> tuple[float, Counter[Sequence]]:
    """Returns the time of all steps, and how many tokens each sequence has got."""
    share, tokens, seconds = TenantShare(), Counter[Sequence](), 0.0
    for _ in range(num_steps):
        chosen = share.choose(ready, ())
        assert chosen
        tokens.update(chosen)
        seconds += seconds_of(len(chosen))
        share.note(len(chosen), seconds_of(len(chosen)))
    return seconds, tokens


@pytest.mark.parametrize(("num_light", "num_heavy"), [(1, 63), (2, 62), (8, 56), (30, 34)])
def test_a_tenant_decodes_at_half_its_speed_at_least_beside_another(num_light: int, num_heavy: int) -> None:
    def seconds_of(num_rows: int) -> float:
        return 1.0 + 0.2 * num_rows

    light, heavy = sequences("light", num_light), sequences("heavy", num_heavy)
    seconds, tokens = run(light + heavy, seconds_of, 1000)
    each = min(tokens[one] for one in light)
    assert seconds / each <= 2 * seconds_of(num_light) * 1.15
    heavy_tokens = [tokens[one] for one in heavy]
    assert min(heavy_tokens) > 0
    assert max(heavy_tokens) - min(heavy_tokens) <= 1, "they take turns"
    assert seconds / sum(heavy_tokens) < 1.5 * seconds_of(num_heavy), "the heavy tenant gets its part"


def test_where_a_step_takes_as_long_with_many_nobody_is_left_out() -> None:
    light, heavy = sequences("light", 1), sequences("heavy", 63)
    _, tokens = run(light + heavy, lambda num_rows: 1.0 + 0.01 * num_rows, 640)
    assert min(tokens[one] for one in heavy) >= 580


def test_three_tenants_get_a_third_each() -> None:
    tenants = [sequences("one", 1), sequences("two", 20), sequences("three", 43)]
    seconds, tokens = run([one for own in tenants for one in own], lambda num_rows: float(num_rows), 1000)
    totals = [sum(tokens[one] for one in own) for own in tenants]
    assert seconds / totals[0] <= 3.3
    assert min(totals) > 0.7 * max(totals)


def test_equal_tenants_have_no_limit() -> None:
    ready = sequences("one", 5) + sequences("two", 5)
    assert len(TenantShare().choose(ready, ())) == 10


def test_beside_a_prompt_of_another_tenant_as_many_decode_as_beside_its_decoding() -> None:
    light, heavy = sequences("light", 1), sequences("heavy", 63)
    share = TenantShare()
    assert len(share.choose(heavy, {"light"})) == 63, "nothing is known yet"
    for _ in range(200):
        chosen = share.choose(light + heavy, ())
        share.note(len(chosen), 1.0 + 0.2 * len(chosen))
    usual = len(share.choose(light + heavy, ())) - 1
    turns = Counter[Sequence]()
    for _ in range(63):
        chosen = share.choose(heavy, {"light"})
        assert 1 <= len(chosen) <= usual
        turns.update(chosen)
    assert len(turns) == 63, "they take turns"
    assert share.choose(heavy[:1], {"light"}) == heavy[:1]
