"""Stored responses: conversations of one tenant, within bounds, the oldest ones gone first."""

from pathlib import Path
from typing import Any

import pytest

from raylens.deployments.config import ResponsesConfig
from raylens.deployments.item_store.stored_responses import StoredResponses
from raylens.preprocess.schema import InvalidRequestError


def responses(tmp_path: Path, **settings: Any) -> StoredResponses:
    return StoredResponses(ResponsesConfig(folder=str(tmp_path), **settings), lambda: 1000.0)


async def kept(stored: StoredResponses, tenant: str) -> list[str]:
    return [one.file_id for one in await stored.all(tenant)]


async def test_a_conversation_is_the_responses_that_it_went_on_from(tmp_path: Path) -> None:
    stored = responses(tmp_path)
    await stored.store("alice", "resp_1", "", b"first")
    await stored.store("alice", "resp_2", "resp_1", b"second")
    await stored.store("alice", "resp_3", "resp_1", b"another second")
    assert await stored.conversation("alice", "resp_2", 100) == b"first\nsecond"
    assert await stored.conversation("alice", "resp_3", 100) == b"first\nanother second"
    with pytest.raises(InvalidRequestError, match="19 bytes or more, the limit is 18"):
        await stored.conversation("alice", "resp_3", 18)
    with pytest.raises(InvalidRequestError, match="no response 'resp_2'") as caught:
        await stored.conversation("bob", "resp_2", 100)
    assert (caught.value.status, caught.value.field) == (404, "response_id")
    await stored.delete("alice", "resp_1")
    with pytest.raises(InvalidRequestError, match="no response 'resp_1'"):
        await stored.conversation("alice", "resp_2", 100)


async def test_a_circle_of_ids_that_a_client_chose_ends_at_the_limit(tmp_path: Path) -> None:
    stored = responses(tmp_path)
    await stored.store("alice", "resp_1", "resp_1", b"12345")
    with pytest.raises(InvalidRequestError, match="15 bytes or more, the limit is 12"):
        await stored.conversation("alice", "resp_1", 12)


async def test_the_tenant_with_most_bytes_makes_room(tmp_path: Path) -> None:
    stored = responses(tmp_path, max_bytes=20)
    await stored.store("bob", "resp_b", "", b"12345")
    for number in range(3):
        await stored.store("alice", f"resp_{number}", "", b"12345")
    await stored.store("carol", "resp_c", "", b"12345")
    assert await kept(stored, "alice") == ["resp_1", "resp_2"]
    assert (await kept(stored, "bob"), await kept(stored, "carol")) == (["resp_b"], ["resp_c"])
    with pytest.raises(InvalidRequestError, match="21 bytes is not kept, the limit of all is 20"):
        await stored.store("carol", "resp_d", "", b"x" * 21)
    assert stored.num_bytes == 20


async def test_an_id_names_the_latest_response(tmp_path: Path) -> None:
    stored = responses(tmp_path, max_bytes=10)
    await stored.store("alice", "resp_1", "", b"12345")
    await stored.store("alice", "resp_1", "", b"1234567890")
    assert await stored.read("alice", "resp_1") == b"1234567890"
    assert (stored.num_files, stored.num_bytes) == (1, 10)
    after = responses(tmp_path, max_bytes=10)
    assert await after.read("alice", "resp_1") == b"1234567890", "the next process finds it"


async def test_there_is_room_for_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylens.deployments.item_store.stored_responses._MAX_RESPONSES", 2)
    stored = responses(tmp_path)
    for number in range(3):
        await stored.store("alice", f"resp_{number}", "", b"x")
    assert await kept(stored, "alice") == ["resp_1", "resp_2"]


async def test_old_ones_are_gone_in_their_order(tmp_path: Path) -> None:
    now = [0.0]
    stored = StoredResponses(ResponsesConfig(folder=str(tmp_path), max_age_s=10), lambda: now[0])
    for number in range(3):
        now[0] = 5.0 * number
        await stored.store("alice", f"resp_{number}", "", b"12345")
    assert await kept(stored, "alice") == ["resp_1", "resp_2"], "the first is ten seconds old"
    now[0] = 16.0
    assert (await kept(stored, "alice"), stored.num_bytes) == (["resp_2"], 5)
    now[0] = 21.0
    assert (await kept(stored, "alice"), stored.num_bytes) == ([], 0)
