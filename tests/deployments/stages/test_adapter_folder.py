"""Which names are adapters, and when one counts as another."""

import os
from pathlib import Path

import pytest

from raylens.deployments.stages.adapter_folder import AdapterFolder
from raylens.llm.lora.request import LoraError
from raylens.preprocess.schema import InvalidRequestError


def add(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "adapter_config.json").write_text("{}")
    return folder / name


def accept(folder: str) -> None:
    """Finds nothing wrong."""


def test_only_folders_with_settings_and_proper_names_are_adapters(tmp_path: Path) -> None:
    for name in ("b", "a b", "ä", ".hidden", "new\nline", "x" * 201):
        add(tmp_path, name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert list(AdapterFolder(str(tmp_path), accept).look()) == ["a b", "b", "ä"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/../a", "/a", "a/", ".hidden", "absent", "a\0", "..\\a"])
def test_other_names_are_not_found(tmp_path: Path, name: str) -> None:
    add(tmp_path, "a")
    add(tmp_path, ".hidden")
    adapters = AdapterFolder(str(tmp_path), accept)
    assert adapters.find("a").folder == str(tmp_path / "a")
    with pytest.raises(InvalidRequestError, match="not served here") as refused:
        adapters.find(name)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_a_changed_adapter_is_another_one(tmp_path: Path) -> None:
    own, adapters = add(tmp_path, "a"), AdapterFolder(str(tmp_path), accept)
    seen = [adapters.find("a")]
    assert adapters.find("a") == seen[0]
    (own / "adapter_model.safetensors").write_bytes(b"1")
    seen.append(adapters.find("a"))
    (own / "adapter_model.safetensors").write_bytes(b"2")
    os.utime(own / "adapter_model.safetensors", ns=(1, 1))
    seen.append(adapters.find("a"))
    assert len(set(seen)) == 3


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generate\.adapters_folder: .*absent is no folder"):
        AdapterFolder(str(tmp_path / "absent"), accept)


def test_a_refused_adapter_is_checked_again_only_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checked: list[str] = []

    def check(folder: str) -> None:
        checked.append(folder)
        if not (tmp_path / "b" / "adapter_model.safetensors").exists() and folder.endswith("b"):
            raise LoraError("it has no weights")

    add(tmp_path, "a")
    own, adapters = add(tmp_path, "b"), AdapterFolder(str(tmp_path), check)
    for _ in range(2):
        assert adapters.look() == {"a": None, "b": "it has no weights"}
    assert checked == [str(tmp_path / "a"), str(own)]
    assert [record.getMessage() for record in caplog.records] == ["adapter b cannot be served: it has no weights"]
    (own / "adapter_model.safetensors").touch()
    assert adapters.look() == {"a": None, "b": None}
