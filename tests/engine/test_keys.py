"""What is part of a job's key, and what a machine without torch is taken to run."""

from dataclasses import replace
from pathlib import Path

import pytest
from engine.fake_video import FakeVideo, video_job

from hyimg_cli.engine.session import Session
from hyimg_cli.errors import MachineError
from hyimg_cli.journal import keys
from hyimg_cli.journal.keys import by_graphs, confirm_graphs, key_of, precision
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.footprint import needs
from hyimg_cli.models import registry
from hyimg_cli.settings.run import (
    BatchConfig,
    Graphs,
    ModelChoice,
    OutputConfig,
    ParallelConfig,
    RunConfig,
)
from hyimg_cli.spec.job import ImageJob

CONFIG = RunConfig(OutputConfig(Path()), model=ModelChoice(device="cpu"))


def test_pixels_that_depend_on_the_batch_have_keys_of_their_own(job: ImageJob) -> None:
    small, variant = (
        replace(CONFIG, batch=BatchConfig(max_size=size, is_invariant=is_invariant))
        for size, is_invariant in ((2, True), (16, False))
    )
    assert key_of(job, [], small) == key_of(job, [], CONFIG)
    assert key_of(job, [], variant) != key_of(job, [], CONFIG)
    # Videos are made one at a time.
    assert key_of(video_job(), [], variant) == key_of(video_job(), [], CONFIG)


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /dev: a driver without a GPU."""
    monkeypatch.setattr(keys, "_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    return tmp_path


def test_any_gpu_that_is_not_hidden_counts(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto, cpu, bare = ModelChoice(), ModelChoice(device="cpu"), ("cpu", "float32")
    assert precision(auto) == bare
    (devices / "nvidia3").touch()
    assert precision(auto) == ("cuda", "bfloat16")
    assert precision(cpu) == bare
    for hidden in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert precision(auto) == bare
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert precision(auto) == ("cuda", "bfloat16")


@pytest.mark.parametrize("kind", ["picture", "video"])
def test_a_model_of_another_precision_than_its_keys_is_refused(
    job: ImageJob, devices: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A driver that shows a GPU, and a torch that finds none."""
    (devices / "nvidia0").touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(registry, "load_video", lambda choice: FakeVideo(choice.model))
    plan = make_plan([job if kind == "picture" else video_job()], registry.model_card)
    with (
        Session(replace(CONFIG, model=ModelChoice())) as session,
        pytest.raises(MachineError, match=r"is in float32.*imply bfloat16") as raised,
    ):
        list(session.run(plan))
    assert raised.value.code == "machine.dtype"


# Whether text is decoded by graphs with "auto", with Triton installed: without a GPU, with one.
AUTO = {
    ("auto", 1): (False, True),
    ("cpu", 1): (False, False),
    ("cuda", 1): (True, True),
    ("cuda:0", 1): (True, True),
    ("cuda:3", 1): (True, True),
    ("balanced", 1): (False, False),
    ("auto", 2): (False, False),
    ("cuda", 2): (False, False),
    ("cpu", 2): (False, False),
}


@pytest.mark.parametrize(("device", "ranks"), AUTO)
@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("has_triton", [False, True])
@pytest.mark.parametrize("asked", ["auto", "on", "off"])
def test_graphs_by_device_ranks_triton_and_gpu(
    job: ImageJob,
    devices: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    ranks: int,
    has_gpu: bool,
    has_triton: bool,
    asked: Graphs,
) -> None:
    """The decision, and that the key and the plan have the same."""
    if has_gpu:
        (devices / "nvidia0").touch()
    monkeypatch.setattr(keys, "triton_lacks", lambda: "" if has_triton else "it is missing")
    choice = ModelChoice(device=device, dtype="float32", decode_graphs=asked)
    by_itself = has_triton and AUTO[device, ranks][has_gpu]
    expected = by_itself if asked == "auto" else asked == "on"
    assert by_graphs(choice, ranks) is expected
    config = replace(CONFIG, model=choice, parallel=ParallelConfig(tensor_ranks=ranks))
    assert keys.pixel_settings(job, config).get("text") == ("graphs" if expected else None)
    card = registry.model_card(registry.EMBEDDED)
    assert needs([job], card, config).has_graphs is expected
    confirm_graphs(choice, ranks, expected)
    with pytest.raises(MachineError) as raised:
        confirm_graphs(choice, ranks, not expected)
    assert raised.value.code == "machine.graphs"
    said = "with" if expected else "without"
    assert f"driver's files imply decoding {said} them" in str(raised.value)


def test_keys_of_a_cpu_name_no_graphs(job: ImageJob, devices: Path) -> None:
    """As before there were any; a GPU's do."""
    bare = replace(CONFIG, model=ModelChoice(dtype="float32"))
    off, on = (
        replace(bare, model=replace(bare.model, decode_graphs=asked)) for asked in ("off", "on")
    )
    assert key_of(job, [], bare) == key_of(job, [], off) != key_of(job, [], on)
    assert key_of(video_job(), [], bare) == key_of(video_job(), [], on)
