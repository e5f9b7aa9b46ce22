"""Admission: budgets hold, nobody waits for ever, keys do not stand in each other's way."""

import asyncio
import random
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.deployments.config import AdmissionConfig, Budget
from raylens.deployments.endpoint import admission
from raylens.deployments.endpoint.admission import Admission, OverloadedError, Ticket
from raylens.deployments.endpoint.api_keys import Caller
from raylens.deployments.item_store.weight import Weight
from raylens.preprocess.schema import InvalidRequestError
from tests.local_ledger import LocalLedger

ONE = Weight(requests=1)


def budget(requests: int = 4, num_bytes: int = 100, pixels: int = 100, tokens: int = 100) -> Budget:
    return Budget(requests=requests, bytes=num_bytes, pixels=pixels, tokens=tokens)


def caller(name: str | None, max_requests: int | None = None) -> Caller:
    return Caller(name, f"salt of {name}", max_requests)


class Desk:
    """An admission with what it refused, and requests that come and go by name."""

    def __init__(self, ledger: LocalLedger | None = None, **settings: object) -> None:
        self.refused: list[str] = []
        self.leases = (ledger or LocalLedger()).leases()
        config = AdmissionConfig.model_validate({"total": budget(), "per_key": budget(2), **settings})
        self.admission = Admission(config, self.leases, self.refused.append)
        self.order: list[str] = []
        self._stacks: dict[str, ExitStack] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def know(self, *callers: Caller) -> None:
        """Lets the callers come and go, so that there are leases of their budgets."""
        for who in callers:
            await self.come("known", who)
            await self.go("known")
        self.order.clear()

    def open(self, name: str, who: Caller) -> Ticket:
        self._stacks[name] = ExitStack()
        return self._stacks[name].enter_context(self.admission.ticket(who))

    def come(self, name: str, who: Caller, weight: Weight = ONE, priority: int = 0) -> "asyncio.Task[None]":
        async def enter(ticket: Ticket) -> None:
            await ticket.enter(weight, priority)
            self.order.append(name)

        self._tasks[name] = asyncio.create_task(enter(self.open(name, who)))
        return self._tasks[name]

    async def go(self, name: str) -> None:
        """Ends it wherever it is."""
        self.cancel(name)
        await asyncio.wait([self._tasks[name]])
        self.close(name)
        await settle()

    def cancel(self, name: str) -> None:
        self._tasks[name].cancel()

    def close(self, name: str) -> None:
        self._stacks[name].close()


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_who_finds_no_room_waits_by_priority_then_arrival() -> None:
    desk = Desk(total=budget(1))
    anybody = caller(None)
    for name, priority in (("first", 0), ("late", 5), ("next", 0), ("urgent by key", 0)):
        desk.come(name, anybody, priority=priority)
    await settle()
    assert desk.order == ["first"]
    assert desk.admission.num_waiting == 3
    for name in ("first", "next", "urgent by key"):
        await desk.go(name)
    assert desk.order == ["first", "next", "urgent by key", "late"]


@pytest.mark.parametrize("room_comes_first", [False, True])
async def test_who_leaves_in_the_moment_in_which_room_comes_keeps_nobody_from_it(room_comes_first: bool) -> None:
    desk = Desk(total=budget(1))
    for name in ("first", "leaver", "next"):
        desk.come(name, caller(None))
    await settle()
    if room_comes_first:
        desk.close("first")
    desk.cancel("leaver")
    if not room_comes_first:
        desk.close("first")
    await settle()
    desk.close("leaver")
    await settle()
    assert desk.order == ["first", "next"]


async def test_a_key_that_has_spent_its_budget_lets_others_by() -> None:
    desk = Desk()
    await desk.know(*map(caller, "ab"))
    for index in range(4):
        desk.come(f"a{index}", caller("a"))
    desk.come("b0", caller("b"))
    await settle()
    assert desk.order == ["a0", "a1", "b0"]
    await desk.go("a0")
    assert desk.order == ["a0", "a1", "b0", "a2"]


async def test_a_key_with_less_in_work_goes_first() -> None:
    desk = Desk(total=budget(2), per_key=budget(2))
    await desk.know(*map(caller, "abc"))
    desk.come("a0", caller("a"))
    desk.come("b0", caller("b"))
    desk.come("a1", caller("a"))
    desk.come("c0", caller("c"))
    await settle()
    await desk.go("b0")
    assert desk.order == ["a0", "b0", "c0"]


async def test_small_requests_do_not_pass_a_heavy_one_by_for_ever() -> None:
    desk = Desk()
    anybody = caller(None)
    desk.come("half", anybody, Weight(requests=1, pixels=60))
    desk.come("heavy", anybody, Weight(requests=1, pixels=90))
    desk.come("light", anybody, Weight(requests=1, pixels=10))
    await settle()
    assert desk.order == ["half"]
    await desk.go("half")
    assert desk.order == ["half", "heavy", "light"]


async def test_more_than_the_budget_is_refused_at_once_by_name_and_size() -> None:
    desk = Desk()
    ticket = desk.open("x", caller("a"))
    with pytest.raises(
        InvalidRequestError, match=r"weighs 101 pixels, the limit of this API key together is 100"
    ) as one:
        await ticket.enter(Weight(requests=1, pixels=101), 0)
    assert one.value.status == 413
    with pytest.raises(InvalidRequestError, match="101 bytes"):
        await ticket.take(Weight(bytes=101))
    assert desk.refused == []


async def test_bytes_are_not_waited_for() -> None:
    desk = Desk(per_key=budget(4, num_bytes=60))
    first, second = desk.open("first", caller("a")), desk.open("second", caller("a"))
    await first.take(Weight(bytes=50))
    with pytest.raises(OverloadedError, match="no room for more bytes of this API key now") as caught:
        await second.take(Weight(bytes=20))
    assert caught.value.reason == "bytes"
    assert caught.value.retry_after_s >= 1
    await desk.open("other", caller("b")).take(Weight(bytes=50))
    with pytest.raises(OverloadedError, match="of all requests"):
        await desk.open("third", caller("c")).take(Weight(bytes=50))
    assert desk.refused == ["bytes", "bytes"]
    desk._stacks["first"].close()
    await second.take(Weight(bytes=20))


async def test_the_queue_has_an_end_in_all_and_for_each_key() -> None:
    desk = Desk(total=budget(1), max_queued_requests=2, max_queued_requests_per_key=1)
    desk.come("running", caller("a"))
    desk.come("a waits", caller("a"))
    await settle()
    with pytest.raises(OverloadedError, match="1 requests of this API key wait already"):
        await desk.come("a again", caller("a"))
    desk.come("b waits", caller("b"))
    await settle()
    with pytest.raises(OverloadedError, match="2 requests wait already") as caught:
        await desk.come("c", caller("c"))
    assert (caught.value.reason, desk.refused) == ("queue", ["queue_of_key", "queue"])


async def test_nobody_waits_longer_than_the_deadline() -> None:
    desk = Desk(total=budget(1), max_queue_seconds=0.05)
    desk.come("running", caller(None))
    with pytest.raises(OverloadedError, match="no room after 0.05 s in the queue"):
        await desk.come("waiting", caller(None))
    assert desk.admission.num_waiting == 0
    await desk.go("running")
    await desk.come("later", caller(None))


async def test_a_keys_own_limit_of_requests_goes_before_the_general_one() -> None:
    desk = Desk()
    one_at_a_time = caller("a", max_requests=1)
    desk.come("a0", one_at_a_time)
    desk.come("a1", one_at_a_time)
    await settle()
    assert desk.order == ["a0"]


class Request:
    def __init__(self, who: str | None, weight: Weight, priority: int) -> None:
        self.who, self.weight, self.priority = who, weight, priority


REQUESTS = st.lists(
    st.builds(
        Request,
        st.sampled_from([None, "a", "b"]),
        st.builds(Weight, st.just(1), st.just(0), st.integers(0, 110), st.integers(0, 60)),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=20,
)


@given(requests=REQUESTS, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_budgets_hold_whoever_comes_goes_or_gives_up(requests: list[Request], seed: int) -> None:
    asyncio.run(_come_and_go(requests, random.Random(seed)))


async def _come_and_go(requests: list[Request], chance: random.Random) -> None:
    desk = Desk(total=budget(3), per_key=budget(2, pixels=80))
    admission, inside = desk.admission, 0

    async def run(request: Request) -> None:
        nonlocal inside
        with admission.ticket(caller(request.who)) as ticket:
            try:
                await ticket.enter(request.weight, request.priority)
            except InvalidRequestError:
                assert request.weight.pixels > 80
                return
            inside += 1
            used = admission.used
            assert inside <= used.requests <= 3
            assert used.pixels <= 100
            assert used.tokens <= 100
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside -= 1

    await _all_end([asyncio.create_task(run(request)) for request in requests], chance)
    assert (admission.used, admission.num_waiting) == (Weight(), 0)
    assert all(quota.num_tickets == 0 for quota in admission._by_key.values())


async def test_a_key_that_has_spent_its_budget_lets_others_by_where_all_have_little_left() -> None:
    desk = Desk(per_key=budget(9, tokens=50), total=budget(9))
    desk.come("a in work", caller("a"), Weight(requests=1, tokens=40))
    desk.come("b in work", caller("b"), Weight(requests=1, tokens=30))
    desk.come("a lacks of both", caller("a"), Weight(requests=1, tokens=45))
    desk.come("b has room", caller("b"), Weight(requests=1, tokens=1), priority=1)
    await settle()
    assert desk.order == ["a in work", "b in work", "b has room"]


async def test_a_keys_budget_counts_all_its_open_requests() -> None:
    desk = Desk(per_key=budget(9, num_bytes=10))
    slow = [desk.open(f"slow {n}", caller("a")) for n in range(3)]  # of which nothing has come yet
    desk.open("short", caller("a"))
    desk._stacks["short"].close()
    await slow[0].take(Weight(bytes=6))
    with pytest.raises(OverloadedError, match="bytes of this API key"):
        await slow[1].take(Weight(bytes=6))


async def test_what_never_fits_in_parts_is_refused_for_good() -> None:
    ticket = Desk().open("x", caller(None))
    await ticket.take(Weight(bytes=60))
    with pytest.raises(InvalidRequestError, match="weighs 120 bytes, the limit of all requests together is 100"):
        await ticket.take(Weight(bytes=60))


async def test_a_changed_limit_of_a_key_counts_while_it_is_busy() -> None:
    desk = Desk(total=budget(9))
    desk.come("first", caller("a", max_requests=1))
    desk.come("second", caller("a", max_requests=2))
    await settle()
    assert desk.order == ["first", "second"]


def two_desks(**settings: object) -> tuple[Desk, Desk]:
    """Of two replicas of the ingress."""
    ledger = LocalLedger()
    return Desk(ledger, **settings), Desk(ledger, **settings)


async def test_replicas_share_a_budget_whoever_gets_the_requests() -> None:
    busy, other = two_desks(per_key=budget(4))
    for index in range(5):
        busy.come(f"{index}", caller("a"))
    await settle()
    assert busy.order == ["0", "1", "2", "3"]
    other.come("elsewhere", caller("a"))
    await settle()
    assert other.order == []
    await busy.go("0")
    await settle()
    assert (busy.order[4:], other.order) == (["4"], []), "who came first is first"
    await busy.go("1")
    await settle()
    assert other.order == ["elsewhere"]


@pytest.mark.long
async def test_what_one_replica_does_not_use_another_gets_for_a_body() -> None:
    idle, busy = two_desks()
    idle.come("short", caller(None))
    await settle()
    await idle.go("short")  # but its lease stays
    ticket = busy.open("long", caller(None))
    await ticket.take(Weight(bytes=90))
    with pytest.raises(OverloadedError, match="no room for more bytes of all requests now"):
        await idle.open("too much", caller(None)).take(Weight(bytes=20))


async def test_a_body_gets_what_another_replica_gives_back() -> None:
    one, other = two_desks()
    await one.open("first", caller(None)).take(Weight(bytes=60))
    waiting = asyncio.create_task(other.open("second", caller(None)).take(Weight(bytes=50)))
    await settle()
    third = asyncio.create_task(one.open("third", caller(None)).take(Weight(bytes=40)))
    await settle()
    assert not waiting.done()
    assert not third.done()
    one.close("first")
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(third, 1)


async def test_the_leases_of_keys_that_have_gone_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MAX_IDLE_KEYS", 2)
    ledger = LocalLedger()
    desk = Desk(ledger)
    busy = desk.open("busy", caller("busy"))
    await busy.enter(ONE, 0)
    await desk.know(*map(caller, "abc"))
    await settle()
    assert {name for name in ledger.ledger._accounts if name.startswith("key")} == {"key busy", "key c"}


async def test_a_queue_that_allows_nobody_lets_in_whom_there_is_room_for() -> None:
    desk = Desk(max_queued_requests=0)
    await desk.come("at once", caller("a"))


@given(requests=st.lists(REQUESTS, min_size=2, max_size=3), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_budgets_of_all_replicas_hold_and_nobody_waits_for_ever(requests: list[list[Request]], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "_GROW_SECONDS", 0.02)
        asyncio.run(_come_and_go_everywhere(requests, random.Random(seed)))


async def _come_and_go_everywhere(requests: list[list[Request]], chance: random.Random) -> None:
    ledger = LocalLedger()
    desks = [Desk(ledger, total=budget(3), per_key=budget(2, pixels=80)) for _ in requests]
    inside: list[tuple[str | None, Weight]] = []
    num_bytes = 0

    async def run(desk: Desk, request: Request) -> None:
        nonlocal num_bytes
        with desk.admission.ticket(caller(request.who)) as ticket, ExitStack() as taken:
            try:
                for size in [chance.randrange(40) for _ in range(chance.randrange(3))]:
                    await ticket.take(Weight(bytes=size))
                    num_bytes += size
                    taken.callback(give_back, size)
                    assert num_bytes <= 100
                await ticket.enter(request.weight, request.priority)
            except (InvalidRequestError, OverloadedError):
                return
            entry = (request.who, request.weight)
            inside.append(entry)
            for who, most in ((None, 100), ("a", 80), ("b", 80)):
                own = [weight for name, weight in inside if who in (None, name)]
                assert len(own) <= (3 if who is None else 2)
                assert sum(weight.pixels for weight in own) <= most
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside.remove(entry)

    def give_back(size: int) -> None:
        nonlocal num_bytes
        num_bytes -= size

    await _all_end(
        [asyncio.create_task(run(desk, one)) for desk, own in zip(desks, requests, strict=True) for one in own], chance
    )


async def _all_end(tasks: "list[asyncio.Task[None]]", chance: random.Random) -> None:
    """Waits for the clients, some of whom leave, and raises what one of them has found."""
    for task in tasks:
        if chance.random() < 0.2:
            await asyncio.sleep(0)
            task.cancel()
    done, pending = await asyncio.wait(tasks, timeout=10)
    assert not pending, "somebody waits for ever"
    for task in done:
        if not task.cancelled():
            task.result()
