"""Torch's settings, which are the whole process's, as each model of a run finds them."""

import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.fake_video import video_job
from event_kinds import is_done

from hyimg_cli.engine import session as sessions
from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.pipelines.torch_settings import torch_settings
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CHOICE = ModelChoice(device="cpu", vae_dtype="float32", deterministic=True)


def _state() -> dict[str, Any]:
    flags = {
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "benchmark": torch.backends.cudnn.benchmark,
        "fills": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return flags | {VARIABLE: os.environ.get(VARIABLE)}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The process's own settings, all of them other than a picture's model wants them."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.backends.cuda.matmul.allow_tf32 = True
    yield _state()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(False)


def _seen(choice: ModelChoice, job: ImageJob, out: Path) -> list[list[dict[str, Any]]]:
    """The settings behind each event of a picture, a video, and a picture by the same model."""
    config = RunConfig(OutputConfig(out), model=choice, batch=BatchConfig(prewarm=False))
    picture = replace(job, bot_task="none", size=SizeRequest(64, 64), num_inference_steps=1)
    film = video_job("film", num_inference_steps=1)
    jobs = (replace(picture, custom_id="first"), film, replace(picture, custom_id="last"))
    seen = []
    with RunFolder(out) as folder, Session(config) as session:
        for one in jobs:
            run = session.run(make_plan([one], registry.model_card), folder)
            found = [(event, _state()) for event in run]
            assert is_done(found[-1][0])
            seen.append([state for _, state in found])
    return seen


def test_each_model_of_a_run_finds_its_own_settings(
    outside: dict[str, Any], job: ImageJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a pretended GPU: the models work on the CPU, torch is set as for a GPU."""

    def on_gpu(choice: ModelChoice, *, draws: bool) -> Any:
        return torch_settings(replace(choice, device="cuda"), draws=draws)

    monkeypatch.setattr(sessions, "torch_settings", on_gpu)
    first, film, last = _seen(CHOICE, job, tmp_path)
    every = {"deterministic": True, "benchmark": False, "fills": False, VARIABLE: ":4096:8"}
    of_pictures = {"cudnn_tf32": False, "matmul_tf32": False}
    assert all(state == outside | every | of_pictures for state in first + last)
    assert all(state == outside | every for state in film)
    assert _state() == outside


def test_a_run_leaves_torch_as_it_was(
    outside: dict[str, Any], job: ImageJob, tmp_path: Path
) -> None:
    _seen(CHOICE, job, tmp_path)
    assert _state() == outside


def test_a_run_that_is_left_puts_torch_back(outside: dict[str, Any], job: ImageJob) -> None:
    config = RunConfig(OutputConfig(Path()), model=CHOICE)
    run = Session(config).run(make_plan([job], registry.model_card))
    next(run)
    assert _state() != outside
    run.close()
    assert _state() == outside


@pytest.mark.parametrize(("dtype", "expected"), [("auto", True), ("float32", False)])
def test_tf32_is_a_gpus_and_a_pictures(dtype: Any, expected: bool, outside: dict[str, Any]) -> None:
    choice = ModelChoice(device="cuda:0", vae_dtype=dtype)
    with torch_settings(choice, draws=True):
        assert torch.backends.cudnn.allow_tf32 is expected
    with torch_settings(choice, draws=False):
        assert _state() == outside
    with torch_settings(replace(choice, device="cpu"), draws=True):
        assert _state() == outside, "a CPU has none"


def test_a_model_without_determinism_takes_it_back(outside: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True)
    with torch_settings(ModelChoice(device="cpu"), draws=True):
        assert not torch.are_deterministic_algorithms_enabled()
    assert _state() == outside | {"deterministic": True}


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other libraries have no such setting"
)
def test_freed_memory_stays_for_the_next_step() -> None:
    def step() -> None:
        blocks = [torch.ones(1_000_000, dtype=torch.uint8) for _ in range(20)]
        blocks.clear()

    with torch_settings(ModelChoice(device="cpu"), draws=True):
        step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 2_000, "each step maps 4,900 pages again if its memory was returned"
