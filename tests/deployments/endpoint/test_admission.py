"""Admission: budgets hold, no request starves, keys do not delay each other."""

import asyncio
import random
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.deployments.config import AdmissionConfig, Budget
from raylens.deployments.endpoint.admission import Admission, OverloadedError, Ticket
from raylens.deployments.endpoint.api_keys import Caller
from raylens.deployments.endpoint.request_cost import RequestCost
from raylens.preprocess.schema import InvalidRequestError

ONE = RequestCost(requests=1)


def budget(requests: int = 4, num_bytes: int = 100, pixels: int = 100, tokens: int = 100) -> Budget:
    return Budget(requests=requests, bytes=num_bytes, pixels=pixels, tokens=tokens)


def caller(name: str | None, max_requests: int | None = None) -> Caller:
    return Caller(name, f"salt of {name}", max_requests)


class Desk:
    """An admission with what it refused, and requests that come and go by name."""

    def __init__(self, **settings: object) -> None:
        self.refused: list[str] = []
        config = AdmissionConfig.model_validate({"total": budget(), "per_key": budget(2), **settings})
        self.admission = Admission(config, self.refused.append)
        self.order: list[str] = []
        self._stacks: dict[str, ExitStack] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def open(self, name: str, who: Caller) -> Ticket:
        self._stacks[name] = ExitStack()
        return self._stacks[name].enter_context(self.admission.ticket(who))

    def come(self, name: str, who: Caller, cost: RequestCost = ONE, priority: int = 0) -> "asyncio.Task[None]":
        async def enter(ticket: Ticket) -> None:
            await ticket.enter(cost, priority)
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
    for index in range(4):
        desk.come(f"a{index}", caller("a"))
    desk.come("b0", caller("b"))
    await settle()
    assert desk.order == ["a0", "a1", "b0"]
    await desk.go("a0")
    assert desk.order == ["a0", "a1", "b0", "a2"]


async def test_a_key_with_less_in_work_goes_first() -> None:
    desk = Desk(total=budget(2), per_key=budget(2))
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
    desk.come("half", anybody, RequestCost(requests=1, pixels=60))
    desk.come("heavy", anybody, RequestCost(requests=1, pixels=90))
    desk.come("light", anybody, RequestCost(requests=1, pixels=10))
    await settle()
    assert desk.order == ["half"]
    await desk.go("half")
    assert desk.order == ["half", "heavy", "light"]


async def test_more_than_the_budget_is_refused_at_once_by_name_and_size() -> None:
    desk = Desk()
    ticket = desk.open("x", caller("a"))
    with pytest.raises(
        InvalidRequestError, match=r"needs 101 pixels, the limit of this API key together is 100"
    ) as one:
        await ticket.enter(RequestCost(requests=1, pixels=101), 0)
    assert one.value.status == 413
    with pytest.raises(InvalidRequestError, match="101 bytes"):
        ticket.take(RequestCost(bytes=101))
    assert desk.refused == []


async def test_bytes_are_not_waited_for() -> None:
    desk = Desk(per_key=budget(4, num_bytes=60))
    first, second = desk.open("first", caller("a")), desk.open("second", caller("a"))
    first.take(RequestCost(bytes=50))
    with pytest.raises(OverloadedError, match="no room for more bytes of this API key now") as caught:
        second.take(RequestCost(bytes=20))
    assert caught.value.reason == "bytes"
    assert caught.value.retry_after_s >= 1
    desk.open("other", caller("b")).take(RequestCost(bytes=50))
    with pytest.raises(OverloadedError, match="of all requests"):
        desk.open("third", caller("c")).take(RequestCost(bytes=50))
    assert desk.refused == ["bytes", "bytes"]
    desk._stacks["first"].close()
    second.take(RequestCost(bytes=20))


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
    def __init__(self, who: str | None, cost: RequestCost, priority: int) -> None:
        self.who, self.cost, self.priority = who, cost, priority


REQUESTS = st.lists(
    st.builds(
        Request,
        st.sampled_from([None, "a", "b"]),
        st.builds(RequestCost, st.just(1), st.just(0), st.integers(0, 110), st.integers(0, 60)),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.long
@given(requests=REQUESTS, num_ingresses=st.integers(1, 3), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_budgets_hold_whoever_comes_goes_or_gives_up(requests: list[Request], num_ingresses: int, seed: int) -> None:
    asyncio.run(_come_and_go(requests, num_ingresses, random.Random(seed)))


async def _come_and_go(requests: list[Request], num_ingresses: int, chance: random.Random) -> None:
    desk = Desk(total=budget(3), per_key=budget(2, pixels=80))
    admission = desk.admission
    admission.divide(num_ingresses)
    inside: list[Request] = []
    num_bytes: dict[Ticket, int] = {}

    def check(taken: list[int], limit: int) -> None:
        """One alone may have more than this ingress' share."""
        assert sum(taken) <= (limit if sum(map(bool, taken)) <= 1 else limit // num_ingresses)

    async def run(request: Request) -> None:
        with admission.ticket(caller(request.who)) as ticket:
            try:
                for size in [chance.randrange(40) for _ in range(chance.randrange(3))]:
                    ticket.take(RequestCost(bytes=size))
                    num_bytes[ticket] = ticket.held.bytes
                    check([*num_bytes.values()], 100)
                await ticket.enter(request.cost, request.priority)
                inside.append(request)
                for who, limit, pixels in ((None, 3, 100), ("a", 2, 80), ("b", 2, 80)):
                    own = [one.cost for one in inside if who in (None, one.who)]
                    check([one.requests for one in own], limit)
                    check([one.pixels for one in own], pixels)
                    check([one.tokens for one in own], 100)
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            except InvalidRequestError:
                assert request.cost.pixels > 80
            except OverloadedError:
                assert num_bytes, "bytes alone are refused at once, beside those of others"
            finally:
                num_bytes.pop(ticket, None)
                if request in inside:
                    inside.remove(request)

    await _all_end([asyncio.create_task(run(request)) for request in requests], chance)
    assert (admission.all.used, admission.num_waiting, admission._by_key) == (RequestCost(), 0, {})


async def test_a_key_that_has_spent_its_budget_lets_others_by_where_all_have_little_left() -> None:
    desk = Desk(per_key=budget(9, tokens=50), total=budget(9))
    desk.come("a in work", caller("a"), RequestCost(requests=1, tokens=40))
    desk.come("b in work", caller("b"), RequestCost(requests=1, tokens=30))
    desk.come("a lacks of both", caller("a"), RequestCost(requests=1, tokens=45))
    desk.come("b has room", caller("b"), RequestCost(requests=1, tokens=1), priority=1)
    await settle()
    assert desk.order == ["a in work", "b in work", "b has room"]


async def test_a_keys_budget_counts_all_its_open_requests() -> None:
    desk = Desk(per_key=budget(9, num_bytes=10))
    slow = [desk.open(f"slow {n}", caller("a")) for n in range(3)]  # of which nothing has come yet
    desk.open("short", caller("a"))
    desk._stacks["short"].close()
    slow[0].take(RequestCost(bytes=6))
    with pytest.raises(OverloadedError, match="bytes of this API key"):
        slow[1].take(RequestCost(bytes=6))


async def test_what_never_fits_in_parts_is_refused_for_good() -> None:
    ticket = Desk().open("x", caller(None))
    ticket.take(RequestCost(bytes=60))
    with pytest.raises(InvalidRequestError, match="needs 120 bytes, the limit of all requests together is 100"):
        ticket.take(RequestCost(bytes=60))


async def test_a_changed_limit_of_a_key_counts_while_it_is_busy() -> None:
    desk = Desk(total=budget(9))
    desk.come("first", caller("a", max_requests=1))
    desk.come("second", caller("a", max_requests=2))
    await settle()
    assert desk.order == ["first", "second"]


async def test_each_of_two_ingresses_admits_half() -> None:
    desks = Desk(), Desk()
    for desk in desks:
        desk.admission.divide(2)
        for index in range(3):
            desk.come(f"{index}", caller(None))
    await settle()
    assert [desk.order for desk in desks] == [["0", "1"]] * 2
    assert {desk.admission.all.limit.requests for desk in desks} == {4}


async def test_a_second_ingress_halves_the_budgets_and_gives_them_back() -> None:
    desk = Desk(per_key=budget(4))
    for index in range(5):
        desk.come(f"{index}", caller("a"))
    await settle()
    assert desk.order == ["0", "1", "2", "3"]
    desk.admission.divide(2)
    for name in ("0", "1", "2"):
        await desk.go(name)
    assert desk.order[4:] == ["4"], "only once fewer than two are in work"
    desk.come("5", caller("a"))
    await settle()
    assert desk.order[5:] == []
    desk.admission.divide(1)
    await settle()
    assert desk.order[5:] == ["5"]


@pytest.mark.parametrize("who", [None, "a"])
async def test_a_request_larger_than_the_share_starts_alone(who: str | None) -> None:
    """The share is 2 requests and 50 pixels."""
    desk = Desk(per_key=budget())
    desk.admission.divide(2)
    desk.come("in work", caller(who), RequestCost(requests=1, pixels=10))
    desk.come("large", caller(who), RequestCost(requests=1, pixels=90))
    desk.come("small", caller(who), RequestCost(requests=1, pixels=10))
    await settle()
    assert desk.order == ["in work"], "small ones do not starve the large one"
    await desk.go("in work")
    assert desk.order == ["in work", "large"]
    await desk.go("large")
    assert desk.order == ["in work", "large", "small"]


async def test_a_body_larger_than_the_share_is_taken_alone() -> None:
    desk = Desk()
    desk.admission.divide(2)
    large, other = desk.open("large", caller("a")), desk.open("other", caller("a"))
    for _ in range(2):
        large.take(RequestCost(bytes=45))
    with pytest.raises(OverloadedError, match="bytes of this API key"):
        other.take(RequestCost(bytes=1))
    desk.close("large")
    other.take(RequestCost(bytes=10))
    with pytest.raises(OverloadedError, match="bytes of this API key"):
        desk.open("large again", caller("a")).take(RequestCost(bytes=45))


async def test_more_ingresses_than_the_budget_has_requests_admit_one_each() -> None:
    desk = Desk(total=budget(1))
    desk.admission.divide(3)
    desk.come("first", caller(None))
    desk.come("second", caller(None))
    await settle()
    assert desk.order == ["first"]


async def test_a_queue_that_allows_nobody_lets_in_whom_there_is_room_for() -> None:
    desk = Desk(max_queued_requests=0)
    await desk.come("at once", caller("a"))


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


async def test_a_batch_leaves_room_and_the_queue_to_others() -> None:
    """Half of each budget stays free, and no live request waits behind a batch's or is refused for it."""
    desk = Desk(total=budget(4), per_key=budget(4), max_queued_requests=1, max_queue_seconds=0.05)
    batch = replace(caller("alice"), is_batch=True)
    for number in range(6):
        desk.come(f"line {number}", batch, priority=2001)
    await settle()
    assert desk.order == ["line 0", "line 1"]
    desk.come("live 0", caller("alice"))
    desk.come("live 1", caller("bob"))
    desk.come("live 2", caller("alice"))
    await settle()
    assert desk.order[2:] == ["live 0", "live 1"]
    await desk.go("line 0")
    assert desk.order[4:] == ["live 2"]
    await asyncio.sleep(0.1)
    for name in ("live 0", "live 1"):
        await desk.go(name)
        assert len(desk.order) == 5
    await desk.go("live 2")
    assert desk.order[5:] == ["line 2"]
    assert desk.refused == []


async def test_a_large_request_of_one_batch_does_not_hold_up_others() -> None:
    """It needs more than half of all, so it waits until nothing else runs."""
    desk = Desk(total=budget(8), per_key=budget(8))
    alice, bob = (replace(caller(name), is_batch=True) for name in ("alice", "bob"))
    desk.come("live", caller("carol"), cost=RequestCost(requests=1, pixels=10))
    desk.come("large", alice, priority=2001, cost=RequestCost(requests=1, pixels=60))
    desk.come("small", bob, priority=2001, cost=RequestCost(requests=1, pixels=10))
    await settle()
    assert desk.order == ["live", "small"]
    await desk.go("small")
    await desk.go("live")
    assert desk.order == ["live", "small", "large"]
