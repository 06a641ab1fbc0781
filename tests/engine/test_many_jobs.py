"""A job of many: little memory, the same as alone."""

import gc
import json
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.engine.eta import Eta
from hyimg_cli.engine.runner import examine, make_plan
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.manifest.planner import text_identity
from hyimg_cli.memory.footprint import needs
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image.think import repeated_texts
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import OutputConfig, RunConfig
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Group

SETTINGS = settle({}, {}, {})
CONFIG = RunConfig(OutputConfig(Path("out")))


def lines_of(count: int) -> list[dict[str, Any]]:
    """Eight edits a photo, with few texts: what is kept of texts is bounded, whatever they are."""
    return [
        {
            "custom_id": f"job-{number}",
            "prompt": f"a red circle behind {number % 10} golden umbrellas",
            "images": [f"photos/{number // 8}.png"],
            "seed": number,
        }
        for number in range(count)
    ]


def jobs_of(lines: list[dict[str, Any]]) -> list[Job]:
    jobs, faults = examine(manifest_of("\n".join(map(json.dumps, lines)).encode(), "m"), SETTINGS)
    assert not faults
    return jobs


@contextmanager
def traced(count: int, *, most: int, peak: int) -> Iterator[None]:
    """Python's memory inside: so many bytes a job stay at most, or are held at once."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        _, highest = tracemalloc.get_traced_memory()
        gc.collect()  # what only waits for the collector is not held
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / count < most, held / count
    assert highest / count < peak, highest / count


def test_a_job_of_many_is_small() -> None:
    make_plan(jobs_of(lines_of(10)))  # what all have in common
    count = 2000
    lines = lines_of(count)
    with traced(count, most=690, peak=980):
        jobs = jobs_of(lines)
        plan = make_plan(jobs)
    assert len(plan.jobs) == count


def test_who_follows_a_run_keeps_little_of_a_job() -> None:
    count = 2000
    plan = make_plan(jobs_of(lines_of(count)))
    (group,) = plan.groups
    assert isinstance(group, Group)
    card = registry.model_card(group.model)
    with traced(count, most=30, peak=150):
        eta = Eta(plan, CONFIG)
        texts = repeated_texts(text_identity(job, card) for job in group.jobs)
        needed = needs(group.jobs, card, CONFIG)
    assert (needed.jobs, eta is not texts) == (count, True)


@pytest.mark.parametrize("number", [1, 2])
def test_a_line_among_others_gives_the_jobs_that_it_gives_alone(number: int) -> None:
    """Numbers that are equal are no equal texts: 3 and 3.0, a ratio and a size."""
    own: list[Mapping[str, Any]] = [
        {},
        {"guidance_scale": 3},
        {"guidance_scale": 3.0},
        {"guidance_scale": 3, "seed": 7, "metadata": {"a": 1}},
        {"size": "1:1"},
        {"size": "16:16"},
        {"ar_seed": 5, "bot_task": "think", "temperature": 0.5},
        {"ar_seed": 6, "bot_task": "think", "temperature": 0.5, "seed": 4},
        {"seed": 4, "bot_task": "think", "temperature": 0.5, "x_more": [1]},
        {"images": ["a.png"]},
        {"images": ["b.png", "c.png"]},
        {"images": ["b.png"], "infer_align_image_size": True},
        {"images": ["d.png"], "keep_outside": True},
        {"n": 2},
        {"seeds": [1, 2]},
        {"cot_text": "<think>a</think>"},
        {"format": "webp", "quality": 50},
    ]
    lines = [{"custom_id": f"job-{n}", "prompt": f"{n}"} | one for n, one in enumerate(own * 2)]
    settings = settle({"n": number} if number > 1 else {}, {}, {})

    def resolved(*lines: Mapping[str, Any]) -> list[str]:
        data = "\n".join(map(json.dumps, lines)).encode()
        jobs, faults = examine(manifest_of(data, "m"), settings)
        assert not faults
        return [_told(job) for job in jobs]

    assert resolved(*lines) == [job for line in lines for job in resolved(line)]


def _told(job: Job) -> str:
    return f"{replace(job, source_line='', user_fields=frozenset())} {sorted(job.user_fields)}"
