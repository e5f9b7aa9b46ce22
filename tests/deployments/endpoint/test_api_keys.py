"""API keys by their hashes: read, found, read again when the file changes."""

import os
import time
from pathlib import Path

import pytest
import yaml

from raylens.deployments.endpoint.api_keys import ApiKeys, ApiKeysError, hash_key, new_key, read_keys
from raylens.deployments.launch.cli import main


def write(file: Path, *entries: object) -> None:
    file.write_text(yaml.safe_dump(list(entries)))


def entry(name: str, key: str, **more: object) -> dict[str, object]:
    return {"name": name, "sha256": hash_key(key), **more}


def test_a_key_is_found_by_its_hash(tmp_path: Path) -> None:
    alice, bob = new_key(), new_key()
    write(tmp_path / "keys.yaml", entry("alice", alice, admin=True), entry("bob", bob, max_requests=2, priority=5))
    keys = ApiKeys(str(tmp_path / "keys.yaml"), {})
    found = keys.find(alice), keys.find(bob)
    assert [caller and caller.name for caller in found] == ["alice", "bob"]
    assert found[0] is not None
    assert found[1] is not None
    assert (found[1].max_requests, found[1].priority) == (2, 5)
    assert (found[0].is_admin, found[1].is_admin) == (True, False)
    assert keys.find("rl-wrong") is None
    assert keys.find(None) is None
    assert keys.find(hash_key(alice)) is None, "the hash is no key"
    assert len({caller.cache_salt for caller in found if caller}) == 2
    assert alice not in (tmp_path / "keys.yaml").read_text()


def test_keys_of_the_environment_and_none_at_all() -> None:
    keys = ApiKeys(None, {"RAYLENS_API_KEYS": "one-key, other-key"})
    given = keys.find("one-key"), keys.find("other-key")
    assert [caller and caller.is_admin for caller in given] == [True, True], "they are the operator's own"
    assert keys.find("one-key, other-key") is None
    nobody = ApiKeys(None, {})
    first, second = nobody.find(None), nobody.find("anything")
    assert first is not None
    assert second is not None
    assert first.name is None
    assert first.cache_salt != second.cache_salt, "what is sent still keeps clients apart"
    assert first.is_admin, "nobody is kept out"
    assert ApiKeys(None, {"RAYLENS_API_KEYS": " , "}).is_open


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file = tmp_path / "keys.yaml"
    write(file, entry("alice", "first"))
    keys = ApiKeys(str(file), {})
    assert keys.find("first") is not None

    write(file, entry("alice", "second"), entry("bob", "third"))
    os.utime(file, ns=(1, 1))
    now[0] += 2
    assert keys.find("first") is not None, "it may be half a file still"
    now[0] += 2
    assert [keys.find(key) is not None for key in ("first", "second", "third")] == [False, True, True]

    for broken in (b"- name: alice\n  sha256: nonsense", b"- \xff", b"- 2026-99-99"):
        file.write_bytes(broken)
        for _ in range(3):
            now[0] += 2
            assert keys.find("second") is not None
    file.unlink()
    now[0] += 2
    assert keys.find("second") is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not YAML"),
        ("name: x", "valid list"),
        ("- {name: a}", "sha256"),
        ("- {name: 'a b', sha256: '" + "0" * 64 + "'}", "name"),
        ("- {name: a, sha256: '" + "0" * 64 + "', quota: 5}", "quota"),
        ("- {name: a, sha256: '" + "0" * 64 + "'}\n- {name: a, sha256: '" + "1" * 64 + "'}", "same name"),
        ("- {name: a, sha256: '" + "0" * 64 + "'}\n- {name: b, sha256: '" + "0" * 64 + "'}", "same key"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_reason(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(ApiKeysError, match=reason) as caught:
        read_keys(tmp_path / "keys.yaml")
    assert "0" * 64 not in str(caught.value)


def test_a_missing_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ApiKeysError, match="No such file"):
        ApiKeys(str(tmp_path / "none.yaml"), {})


def test_the_command_makes_a_key_that_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    write(file, entry("alice", "first", max_requests=3))
    assert main(["key", "bob", "--file", str(file)]) == 0
    key = capsys.readouterr().out.strip()
    keys = ApiKeys(str(file), {})
    found = keys.find(key), keys.find("first")
    assert [caller and caller.name for caller in found] == ["bob", "alice"]
    assert found[1] is not None
    assert found[1].max_requests == 3, "what was there stays"
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["key", "carol", "--admin", "--file", str(file)]) == 0
    admin = ApiKeys(str(file), {}).find(capsys.readouterr().out.strip())
    assert admin is not None
    assert (admin.name, admin.is_admin, found[0] and found[0].is_admin) == ("carol", True, False)
    assert main(["key", "carol", "--file", str(tmp_path / "new.yaml")]) == 0
    for name, reason in (("bob", "already"), ("a b", "no name for a key")):
        before = file.read_text()
        assert main(["key", name, "--file", str(file)]) == 2
        assert reason in capsys.readouterr().err
        assert file.read_text() == before


def test_serving_refuses_a_file_of_keys_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"applications": [{"args": {"auth": {"keys_file": str(tmp_path / "none.yaml")}}}]}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(settings))
    assert main(["serve", "--config", str(tmp_path / "serve.yaml")]) == 2
    assert "auth.keys_file" in capsys.readouterr().err
