"""Prewarming runs shapes, not jobs: once each, and without a trace in any later picture."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.conftest import studio_of
from event_kinds import is_done
from PIL import Image

from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.footprint import Together, prompt_tokens
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image import prewarm as module
from hyimg_cli.pipelines.image.pipeline import ImagePipeline
from hyimg_cli.pipelines.image.prewarm import Shape, prewarm, shape_of
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import Prewarmed
from hyimg_cli.spec.job import ImageJob

Tell = Callable[..., Any]


@pytest.fixture
def jobs(job: ImageJob, sources: tuple[str, ...]) -> list[ImageJob]:
    """Two shapes: three edits that write, two plain pictures."""
    text = replace(job.text, max_new_tokens=6)
    edits = [replace(job, custom_id=f"e{n}", images=sources[:1], text=text) for n in range(3)]
    plain = [replace(job, custom_id=f"p{n}", bot_task="none", seed=n) for n in range(2)]
    return [*edits, *plain]


def test_each_shape_is_run_once(family: Any, jobs: list[ImageJob]) -> None:
    warmed: set[Shape] = set()
    studio = studio_of(family)
    assert len(prewarm(jobs, studio, together=Together(4, 4), warmed=warmed)) == 2
    before = family.rows_seen
    assert len(prewarm(jobs, studio, together=Together(4, 4), warmed=warmed)) == 0
    assert family.rows_seen == before
    assert warmed == {shape_of(job, family.card) for job in jobs}


def test_sources_of_many_sizes_are_one_shape(
    family: Any, jobs: list[ImageJob], tmp_path: Path
) -> None:
    edits = []
    for side in range(40, 52):
        Image.new("RGB", (side, side + 3), "white").save(tmp_path / f"{side}.png")
        edits.append(
            replace(jobs[0], custom_id=f"s{side}", images=(str(tmp_path / f"{side}.png"),))
        )
    assert len(prewarm(edits, studio_of(family), together=Together(4, 4), warmed=set())) == 1


def test_random_states_and_the_tree_stay_untouched(family: Any, jobs: list[ImageJob]) -> None:
    tree: KVTree[Any] = KVTree(10**9)
    state = torch.get_rng_state()
    prewarm(jobs, studio_of(family, tree=tree), together=Together(2, 2), warmed=set())
    assert torch.equal(torch.get_rng_state(), state)
    assert tree.held_bytes == 0


def test_a_job_that_will_fail_does_not_stop_prewarming(family: Any, jobs: list[ImageJob]) -> None:
    broken = [
        replace(jobs[0], custom_id="no-file", images=("missing.png",)),
        replace(jobs[3], custom_id="control", prompt="<img>", guidance_scale=1.0),
    ]
    assert (
        len(prewarm([*broken, *jobs], studio_of(family), together=Together(2, 2), warmed=set()))
        == 3
    )


@pytest.mark.parametrize("place", ["encode_source", "velocities", "prefill"])
def test_a_lost_stand_in_is_a_warning_and_the_jobs_run(
    jobs: list[ImageJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    """A kernel that cannot be built, in any stage; the error of the library is in the warning."""
    one, failures = registry.load(ModelChoice(dtype="float32")), [1]
    inner = getattr(one, place)

    def built_once(*given: Any, **named: Any) -> Any:
        if failures:
            failures.clear()
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")
        return inner(*given, **named)

    monkeypatch.setattr(one, place, built_once)
    config = RunConfig(OutputConfig(tmp_path), batch=BatchConfig(prewarm=True))
    with RunFolder(tmp_path) as folder:
        session = Session(config, load=lambda choice, **_: one)
        events = list(session.run(make_plan(jobs[:1], registry.model_card), folder))
    assert [event.outcome.status for event in events if is_done(event)] == ["done"]
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == (
        "prewarming failed (RuntimeError: Failed to find C compiler. Please specify via CC): "
        "the jobs run without it"
    )


@pytest.mark.parametrize(("device", "runs"), [("cpu", 0), ("cuda", 1)])
def test_only_a_gpu_prewarms_by_default(
    family: Any, jobs: list[ImageJob], tmp_path: Path, device: str, runs: int
) -> None:
    pipeline = ImagePipeline(RunConfig(OutputConfig(tmp_path)))
    pipeline._model = On(family, torch.device(device))  # type: ignore[assignment]
    assert pipeline._gains_by_prewarming() == bool(runs)
    pipeline._serves = True
    assert pipeline._gains_by_prewarming()


@pytest.mark.usefixtures("processor_clock")
@pytest.mark.parametrize("batch", [1, 16])
def test_pixels_are_the_same_with_and_without(
    jobs: list[ImageJob], tmp_path: Path, batch: int
) -> None:
    digests = []
    for is_on in (True, False):
        out = tmp_path / str(is_on)
        config = RunConfig(OutputConfig(out), batch=BatchConfig(max_size=batch, prewarm=is_on))
        with RunFolder(out) as folder:
            events = list(Session(config).run(make_plan(jobs, registry.model_card), folder))
        assert any(isinstance(event, Prewarmed) for event in events) == is_on
        outcomes = [event.outcome for event in events if is_done(event)]
        digests.append({o.custom_id: o.outputs[0].pixel_sha256 for o in outcomes})
        assert len(outcomes) == len(jobs)
        # Its seconds are apart: no job was under way yet.
        assert all(o.timings_s["unattributed"] < 0.05 * o.timings_s["total"] for o in outcomes)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("device", "stand_ins"), [("cpu", 4), ("cuda", 2)])
def test_a_gpu_needs_one_stand_in_a_shape(
    family: Any, jobs: list[ImageJob], monkeypatch: pytest.MonkeyPatch, device: str, stand_ins: int
) -> None:
    """Two at most work together: of both shapes two on a CPU."""
    run: list[ImageJob] = []
    monkeypatch.setattr(module, "_run", lambda jobs, *_: run.extend(jobs) or ())
    stages = replace(studio_of(family), model=On(family, torch.device(device)))
    assert len(module.prewarm(jobs, stages, together=Together(2, 2), warmed=set())) == 2
    assert len(run) == stand_ins


def test_a_gpu_is_warmed_at_the_lengths_of_the_texts(
    family: Any, jobs: list[ImageJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stand-in for each range of lengths that jobs have, by its longest job."""
    run: list[ImageJob] = []
    monkeypatch.setattr(module, "_run", lambda jobs, *_: run.extend(jobs) or ())
    stages = replace(studio_of(family), model=On(family, torch.device("cuda")))
    words = (3, 290, 5, 300, 4)
    jobs = [
        replace(jobs[3], custom_id=f"{n}", prompt="a " * count) for n, count in enumerate(words)
    ]
    shapes = prewarm(
        jobs,
        stages,
        together=Together(2, 2),
        warmed=set(),
        tokens_of=lambda job: len(job.prompt),
    )
    assert [len(one.prompt) // 2 for one in run] == [5, 300]
    assert [shape.tokens for shape in shapes] == [512, 1024]
    # Where no length counts one stand-in does; of very many jobs some are looked at.
    run.clear()
    prewarm(jobs, stages, together=Together(2, 2), warmed=set())
    assert len(run) == 1
    monkeypatch.setattr(module, "_MOST_JOBS", 2)
    seen: list[str] = []
    tell = lambda job: len(seen.append(job.custom_id) or "")  # noqa: E731
    prewarm(jobs, stages, together=Together(2, 2), warmed=set(), tokens_of=tell)
    assert seen == ["0", "3"]
    # What a run counts by: words more are tokens more.
    few, many = (prompt_tokens(jobs[number], None) for number in (0, 3))
    assert many >= few + 297


class On:
    """A model's card, and the device that it is on."""

    def __init__(self, family: Any, device: torch.device) -> None:
        self.card, self.layer_devices = family.card, [device]
