"""The records of the latest requests: how many are kept, and whose."""

from raylens.deployments.item_store.recent_traces import RecentTraces


def test_the_latest_are_kept() -> None:
    traces = RecentTraces(2)
    for name in ("a", "b", "a", "c"):
        traces.keep("tenant", name, name.encode())
    assert [traces.find("tenant", name) for name in ("a", "b", "c")] == [b"a", None, b"c"]


def test_two_tenants_may_use_one_id() -> None:
    traces = RecentTraces(10)
    traces.keep("one", "r", b"1")
    traces.keep("two", "r", b"2")
    assert (traces.find("one", "r"), traces.find("two", "r"), traces.find("three", "r")) == (b"1", b"2", None)


def test_who_may_see_all_finds_the_latest_of_an_id() -> None:
    traces = RecentTraces(10)
    traces.keep("one", "r", b"1")
    traces.keep("two", "r", b"2")
    traces.keep("two", "s", b"3")
    assert (traces.find(None, "r"), traces.find(None, "s"), traces.find(None, "t")) == (b"2", b"3", None)


def test_none_may_be_kept() -> None:
    traces = RecentTraces(0)
    traces.keep("one", "r", b"1")
    assert traces.find("one", "r") is None
