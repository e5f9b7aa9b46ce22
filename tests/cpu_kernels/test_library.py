"""Which library is used."""

from pathlib import Path

import pytest

from raylens.cpu_kernels import library
from raylens.cpu_kernels.library import VARIABLE, KernelLibrary, kernel_library, why_missing


def test_the_fastest_that_runs_here_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    found = kernel_library()
    assert found is not None, "the kernels are not built: `make compiler` installs one, then `make` builds them"
    assert found.build == library._usable_builds()[0]


@pytest.mark.parametrize(
    ("capability", "has_amx", "builds"),
    [("AVX512", True, 4), ("AVX512", False, 3), ("AVX2", False, 2), ("DEFAULT", False, 1), ("NEON", False, 1)],
)
def test_a_processor_gets_what_it_can_run(
    capability: str, has_amx: bool, builds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr(library, "_has_amx", lambda: has_amx)
    assert library._usable_builds() == library.BUILDS[-builds:]
    monkeypatch.setenv(VARIABLE, "baseline")
    found = kernel_library()
    assert found is not None
    assert found.build == "baseline"


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    assert kernel_library() is None
    assert VARIABLE in why_missing()


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv(VARIABLE, "avx512")
    with pytest.raises(
        ValueError, match="RAYLENS_CPU_KERNELS is 'avx512'; on this processor it can be avx2, baseline or"
    ):
        kernel_library()


def test_a_library_that_the_system_refuses_is_left_aside(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    monkeypatch.setattr(library, "_usable_builds", lambda: library.BUILDS)

    class Refused(KernelLibrary):
        def __init__(self, build: str, path: Path) -> None:
            super().__init__("baseline", path.with_name(path.name.replace(build, "baseline")))
            self.build, self.is_usable = build, lambda: build not in ("amx", "avx512")

    monkeypatch.setattr(library, "KernelLibrary", Refused)
    found = kernel_library()
    assert found is not None
    assert found.build == "avx2"
    assert "the system does not let this process use the processor's amx" in caplog.text


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    monkeypatch.setattr(library, "EXTENSION_SUFFIXES", [".none"])
    assert kernel_library() is None
    assert "compiler" in why_missing()


@pytest.mark.parametrize("error", [OSError("version `GLIBC_9.9' not found"), AttributeError("undefined symbol")])
def test_a_library_of_another_system_is_left_aside(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str) -> None:
        raise error

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    monkeypatch.setattr("ctypes.CDLL", fail)
    assert kernel_library() is None
    assert str(error) in caplog.text
    assert "cannot be used on this system" in why_missing()
