"""What a server keeps from other users of its machine."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from raylens.deployments.cluster.private_files import keep_ray_token_private


@pytest.fixture(autouse=True)
def without_a_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_servers_that_start_at_once_agree_on_one_token(tmp_path: Path) -> None:
    num_servers = 8
    starts = Barrier(num_servers)

    def start(home: Path) -> str:
        starts.wait()
        keep_ray_token_private(home)
        return (home / ".ray" / "auth_token").read_text()

    with ThreadPoolExecutor(num_servers) as pool:
        for number in range(30):
            home = tmp_path / str(number)
            (token,) = set(pool.map(start, [home] * num_servers))
            assert len(token) == 64
            assert [(file.name, mode(file)) for file in (home / ".ray").iterdir()] == [("auth_token", 0o600)]


def test_a_token_that_others_may_read_becomes_private(tmp_path: Path) -> None:
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("the token")
    file.chmod(0o644)
    keep_ray_token_private(tmp_path)
    assert (file.read_text(), mode(file)) == ("the token", 0o600)


def test_a_node_of_a_cluster_makes_no_token_of_its_own(tmp_path: Path) -> None:
    keep_ray_token_private(tmp_path, make=False)
    assert os.listdir(tmp_path) == []


def test_a_token_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".ray").write_text("a file, not a folder")
    with pytest.raises(RuntimeError, match="cannot be kept private: "):
        keep_ray_token_private(tmp_path)


@pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_of_the_users_own_is_left_to_the_user(
    tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "mine")
    keep_ray_token_private(tmp_path)
    assert os.listdir(tmp_path) == []
