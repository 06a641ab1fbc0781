"""Requirements of Triton are reported before the first kernel of a run fails without them."""

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hyimg_cli.doctor import environment
from hyimg_cli.doctor.check import Check
from hyimg_cli.settings.run import ModelChoice, OutputConfig, RunConfig

pytest.importorskip("triton", reason="without Triton nothing is built")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Check]:
    """Called in a test, once it has set up the machine: a GPU is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment, "_choice", lambda *_: "kernel")
    monkeypatch.delenv("CC", raising=False)
    config = RunConfig(OutputConfig(Path()), model=ModelChoice(device="cuda"))
    return lambda: environment.kernels(config)


def test_a_compiler_and_headers_are_enough(
    check: Callable[[], Check], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "gcc" if name == "gcc" else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert check().status == "warning"
    assert "Python.h is missing" in check().found
    (tmp_path / "Python.h").touch()
    assert check().status == "ok"


def test_no_compiler_makes_a_run_slower(
    check: Callable[[], Check], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert check().status == "warning"
    assert "C compiler is missing" in check().found
    assert "gcc" in check().hint
    monkeypatch.setenv("CC", "cc")
    assert check().status == "ok"
