"""Without a compiler: what is refused, and what a GPU does without, both before a model loads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.errors import MachineError
from hyimg_cli.journal.keys import here
from hyimg_cli.kernels.choice import has_triton
from hyimg_cli.memory.refusals import refuse_settings
from hyimg_cli.settings.run import MachineInfo, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec import compilers


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A path of programs without a compiler, and what was found before is forgotten."""
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    compilers.triton_lacks.cache_clear()
    yield tmp_path
    compilers.triton_lacks.cache_clear()


def config(**choice: Any) -> RunConfig:
    return RunConfig(OutputConfig(Path("out")), model=ModelChoice(device="cpu", **choice))


def test_blocks_are_not_compiled_without_a_compiler(nowhere: Path) -> None:
    refuse_settings([], config())
    with pytest.raises(MachineError, match=r"--compile-blocks .* a C\+\+ compiler") as found:
        refuse_settings([], config(compile_blocks=True))
    assert (found.value.code, found.value.exit_code) == ("machine.compiler", 3)
    assert "remove it, or install gcc" in found.value.hint
    # Another machine runs it.
    refuse_settings([], config(compile_blocks=True, machine=MachineInfo(True, True)))
    (nowhere / "g++").touch(mode=0o755)
    if "Python.h" not in compilers.compiler_lacks(is_cpp=True):
        refuse_settings([], config(compile_blocks=True))


def test_triton_needs_a_compiler(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_triton()
    assert not here().has_triton
    assert compilers.triton_lacks() in ("a C compiler is missing", "triton is not installed")
    compilers.triton_lacks.cache_clear()
    monkeypatch.setenv("CC", "clang")
    assert compilers.triton_lacks() != "a C compiler is missing"
