"""What `plan` promises before anything runs, against what the run counts."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import thorough_but
from event_kinds import is_done
from processors import is_exact_here

from hyimg_cli.cache.disk import SOURCE_IMAGES
from hyimg_cli.engine.forecast import forecast
from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.settings.run import BatchConfig, CacheConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest


def _config(out: Path, **batch: Any) -> RunConfig:
    choice = ModelChoice(device="cpu", dtype="float32")
    return RunConfig(OutputConfig(out), model=choice, batch=BatchConfig(**batch))


@pytest.fixture
def jobs(job: ImageJob, sources: tuple[str, ...]) -> list[ImageJob]:
    """Edits of two pictures with and without text, and seeds of one prompt."""
    short = replace(job.text, max_new_tokens=3)
    edits = [
        replace(
            job,
            custom_id=f"edit-{n}",
            images=sources[n % 2 : n % 2 + 1],
            prompt="make it " + "very " * n + "red",
            bot_task="recaption" if n < 4 else "none",
            text=short,
        )
        for n in range(6)
    ]
    seeds = [
        replace(job, custom_id=f"seed-{n}", seed=n, bot_task="none", size=SizeRequest(64, 64))
        for n in range(3)
    ]
    return [*edits, *seeds]


@pytest.mark.parametrize(
    "state", thorough_but(["cold", "half", "cut"], ["off", "cold", "half", "warm", "cut"])
)
def test_image_encodes_agree_with_the_run_whatever_is_on_disk(
    jobs: list[ImageJob], tmp_path: Path, state: str
) -> None:
    cache = CacheConfig(tmp_path / "cache", budget_mb=0 if state == "off" else 10)
    config = replace(_config(tmp_path / "out", prewarm=False), cache=cache)
    before = {"half": jobs[:1], "warm": jobs, "cut": jobs}.get(state, [])
    _encodes(before, replace(config, output=OutputConfig(tmp_path / "before")))
    if state == "cut":
        path = min((tmp_path / "cache" / SOURCE_IMAGES).iterdir())
        path.write_bytes(path.read_bytes()[:-1])
    promised = forecast(make_plan(jobs, registry.model_card), config, assumed_think=0)
    expected = {"off": 2, "cold": 2, "half": 1, "warm": 0, "cut": 1}[state]
    assert promised.total.image_encodes == _encodes(jobs, config) == expected


def _encodes(jobs: list[ImageJob], config: RunConfig) -> int:
    """Images that a session encodes for the jobs, as their last line says."""
    with RunFolder(config.output.folder) as folder:
        events = list(Session(config).run(make_plan(jobs, registry.model_card), folder))
    lines = [event.outcome for event in events if is_done(event)]
    assert len(lines) == len(jobs)
    return lines[-1].cache["source_images"]["misses"] if lines else 0


def test_a_job_that_will_fail_counts_no_text_and_stops_nothing(
    jobs: list[ImageJob], tmp_path: Path
) -> None:
    good = jobs[-1]
    bad = [
        replace(good, custom_id="control", prompt="a <boi>"),
        replace(good, custom_id="long", prompt="word " * 5000, bot_task="think"),
        replace(good, custom_id="unshipped", use_system_prompt="en_unified"),
        replace(good, custom_id="unread", images=(str(tmp_path / "none.png"),), cot_text="<img>"),
    ]
    plan = make_plan([*bad, good], registry.model_card)
    alone = forecast(make_plan([good], registry.model_card), _config(tmp_path), assumed_think=9)
    total = forecast(plan, _config(tmp_path), assumed_think=9).total
    assert (total.jobs, total.texts) == (5, 0)
    assert total.denoise_steps == 5 * alone.total.denoise_steps


@pytest.mark.parametrize("size", [1, 16])
def test_texts_are_counted_as_the_run_writes_them(
    job: ImageJob, sources: tuple[str, ...], tmp_path: Path, size: int
) -> None:
    """A text of four seeds, an edit of two, a lone one; a copy of the source is another source."""
    short = replace(job.text, max_new_tokens=5)
    seeds = [replace(job, custom_id=f"seed-{n}", seed=n, text=short) for n in range(4)]
    edits = [
        replace(job, custom_id=f"edit-{n}", seed=n, images=sources[:1], text=short)
        for n in range(2)
    ]
    copy = Path(sources[0]).with_name("copy.png")
    shutil.copy(sources[0], copy)
    lone = replace(job, custom_id="lone", images=(str(copy),), text=short)
    lost = [replace(job, custom_id=f"lost-{n}", images=("gone.png",)) for n in range(2)]
    config = _config(tmp_path / "out", prewarm=False, max_size=size)
    plan = make_plan([*seeds, *edits, lone, *lost], lambda m: registry.model_card(m))
    told = forecast(plan, config, assumed_think=5).total
    assert (told.texts, told.shared_texts) == (3, 4)
    with RunFolder(tmp_path / "out") as folder, Session(config) as session:
        done = [e.outcome for e in session.run(plan, folder) if is_done(e)]
    reports = [outcome.kv_reuse for outcome in done]
    assert len(done) == 7
    assert sum(report.ar_decode_tokens > 0 for report in reports if report) == told.texts
    taken = [report.ar_taken_tokens for report in reports if report and report.ar_taken_tokens]
    assert len(taken) == told.shared_texts
    assert sum(outcome.cot_from is not None for outcome in done) == told.shared_texts
    assert told.think_rows == 5 * told.texts
    alone = _config(tmp_path / "alone", prewarm=False)
    with RunFolder(tmp_path / "alone") as folder, Session(alone) as session:
        for one in plan.jobs:
            session.forget()
            list(session.run(make_plan([one], lambda m: registry.model_card(m)), folder))
        each = folder.results()
    for outcome in done:
        line = each[outcome.custom_id]
        if is_exact_here():
            assert line["outputs"][0]["pixel_sha256"] == outcome.outputs[0].pixel_sha256
        assert tuple(line["cot_token_ids"]) == outcome.cot_token_ids
