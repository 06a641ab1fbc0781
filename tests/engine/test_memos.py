"""Values kept in memory between pictures: their counters are in every line and change no id."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_kinds import is_done

from hyimg_cli.engine.session import Session
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3 import prompter as prompter_room
from hyimg_cli.models.hunyuan_image3.prompter import Prompter
from hyimg_cli.settings.run import BatchConfig, OutputConfig, RunConfig
from hyimg_cli.spec.job import ImageJob


def _caches(jobs: list[ImageJob], out: Path) -> list[dict[str, dict[str, int]]]:
    config = RunConfig(OutputConfig(out), batch=BatchConfig(max_size=1, prewarm=False))
    events = Session(config).run(make_plan(jobs, registry.model_card))
    return [event.outcome.cache for event in events if is_done(event)]


def test_a_second_seed_finds_prompt_and_angles(job: ImageJob, tmp_path: Path) -> None:
    jobs = [
        replace(job, custom_id=f"{n}", prompt=f"seen nowhere else: {tmp_path.name}", seed=n)
        for n in range(2)
    ]
    first, second = _caches(jobs, tmp_path)
    assert set(first) == {"source_images", "prompt_tokens", "layouts", "rope_tables"}
    assert first["prompt_tokens"]["misses"] >= 1
    assert first["rope_tables"]["misses"] >= 2, "text, and the picture's grid"
    for kind in ("prompt_tokens", "layouts", "rope_tables"):
        assert second[kind]["misses"] == first[kind]["misses"], kind
    # Its sequence is built from the prompt's tokens that were there.
    for kind in ("prompt_tokens", "rope_tables"):
        assert second[kind]["hits"] > first[kind]["hits"], kind


def test_counting_begins_with_the_session(job: ImageJob, tmp_path: Path) -> None:
    """The prompter lives as long as the process; a line tells what its own run did."""
    # What all prompts share is made once a process, and no run's own.
    _caches([replace(job, prompt="any other")], tmp_path)
    jobs = [replace(job, prompt=f"another of {tmp_path.name}")]
    (first,), (again,) = _caches(jobs, tmp_path), _caches(jobs, tmp_path)
    assert again["layouts"]["misses"] == 0
    assert sum(again["layouts"].values()) == sum(first["layouts"].values())
    assert again["rope_tables"] == first["rope_tables"], "a loaded model's own"


def test_counts_are_the_same_without_room_to_keep_sequences(
    job: ImageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(prompter: Prompter) -> list[Any]:
        given = replace(job, cot_text="<recaption>a red circle</recaption>")
        jobs = (job, given, job, replace(job, prompt="other"), given)
        return [prompter.count(one, (), 9) for one in jobs]

    folder = registry.resolve_model(registry.EMBEDDED)
    kept = Prompter(folder, registry.EMBEDDED)
    monkeypatch.setattr(prompter_room, "_LAYOUT_BYTES", 0)
    bare = Prompter(folder, registry.EMBEDDED)
    assert counted(kept) == counted(bare)
    assert kept.memo_counts()["layouts"]["hits"] == 3
    assert bare.memo_counts()["layouts"]["hits"] == 0
