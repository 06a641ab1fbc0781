"""Captures that fail, or give something else: the same numbers, and a warning each time it
matters.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.conftest import studio_of
from event_kinds import is_done
from torch import Tensor

from hyimg_cli.engine.session import Session
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.keys import key_of
from hyimg_cli.kernels.decode_attention import plain_decode
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.footprint import Together
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.models.hunyuan_image3.graphs import BUCKETS, DecodeGraphs, buckets_up_to
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobStarted, Prewarmed
from hyimg_cli.spec.job import ImageJob

Compute = Callable[[], Tensor]


@dataclass
class Captures:
    """Captures that compute anew, but for the one numbered `at`, counted from 1: that raises
    `error`. `rows`: of each that was asked for.
    """

    at: int = 0
    error: Exception | None = None
    rows: list[int] = field(default_factory=list)

    def __call__(self, compute: Compute) -> Compute:
        self.rows.append(len(compute()))
        if len(self.rows) != self.at:
            return compute
        assert self.error is not None
        raise self.error


WRONG: list[Any] = [
    pytest.param({"at": 1, "error": torch.OutOfMemoryError("no room\nmore")}, 1, id="memory"),
    pytest.param({"at": 1, "error": RuntimeError("stream is capturing")}, 1, id="first"),
    pytest.param({"at": 3, "error": ValueError("a compiler's own")}, 3, id="third"),
]


def with_graphs(family: Any, capture: Any) -> Any:
    graphs = DecodeGraphs(family.network, plain_decode, capture)
    return HunyuanImage3(family.network, family.prompter, graphs=graphs)


@pytest.fixture
def jobs(job: ImageJob) -> list[ImageJob]:
    """Texts of several lengths: rows leave one by one, from three down to one."""
    return [
        replace(
            job,
            custom_id=f"{n}",
            num_inference_steps=1,
            guidance_scale=1.0,
            ar_seed=n,
            text=replace(job.text, temperature=1.0, max_new_tokens=3 + 3 * n),
        )
        for n in range(3)
    ]


def ends(jobs: list[ImageJob], model: Any) -> list[Any]:
    run = ContinuousBatch(
        WholeBatches(
            map(Ticket, jobs), studio_of(model), lambda since: PhaseClock(since, lambda: None)
        ),
        Together(len(jobs), len(jobs)),
    )
    found = [event for event in run.run() if isinstance(event, ImageRequest)]
    assert len(found) == len(jobs)
    return found


@pytest.fixture(scope="module")
def computed() -> dict[str, Any]:
    """What uncaptured steps made of the jobs, made once."""
    return {}


@pytest.mark.parametrize(("wrong", "rows"), WRONG)
def test_whatever_a_capture_does_the_numbers_are_the_same(
    family: Any,
    jobs: list[ImageJob],
    computed: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    wrong: dict[str, Any],
    rows: int,
) -> None:
    """Bit for bit those of steps that nobody captures, and of captures that succeed."""
    if not computed:
        computed["uncaptured"] = ends(jobs, with_graphs(family, None))
        computed["captured"] = ends(jobs, with_graphs(family, Captures()))
    captures = Captures(**wrong)
    model = with_graphs(family, captures)
    with caplog.at_level(logging.WARNING):
        captured = model.graphs.prepare(3)
        assert captured == rows - 1
        pictures = ends(jobs, model)
    # Behind a failure nothing is tried again.
    assert captures.rows == list(range(1, rows + 1))
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert f"a decode step of {rows} row" in told[0]
    for picture, *others in zip(
        pictures, computed["uncaptured"], computed["captured"], strict=True
    ):
        for other in others:
            assert picture.text == other.text
            assert np.array_equal(picture.pixels, other.pixels)
            assert not [note for note in other.warnings if "graph" in note]
        assert told[0] in picture.warnings


def test_only_texts_that_went_without_are_told(family: Any) -> None:
    graphs = DecodeGraphs(family.network, plain_decode, Captures(3, ValueError("no")))
    assert graphs.degraded(3) == ""
    assert graphs.prepare(2) == 2
    assert graphs.prepare(8) == 0
    assert graphs.captured == [1, 2]
    assert graphs.degraded(1) == graphs.degraded(2) == ""
    assert "3 rows (no)" in graphs.degraded(3)
    assert graphs.degraded(64) == graphs.degraded(3)


def test_steps_that_no_graph_can_hold_are_computed_and_told_once(
    family: Any, jobs: list[ImageJob], caplog: pytest.LogCaptureFixture
) -> None:
    """On such a GPU it is no fault: nothing is tried, and no line warns of it."""
    captures = Captures()
    graphs = DecodeGraphs(family.network, plain_decode, captures, most_rows=2)
    model = HunyuanImage3(family.network, family.prompter, graphs=graphs)
    with caplog.at_level(logging.WARNING):
        assert model.graphs.prepare(2) == 2
        assert not caplog.records
        assert model.graphs.prepare(12) == 0
        pictures = ends(jobs, model)
    assert captures.rows == graphs.captured == [1, 2]
    (told,) = [record.message for record in caplog.records]
    assert "decode steps of more than 2 rows run without a CUDA graph" in told
    for picture, other in zip(pictures, ends(jobs, with_graphs(family, None)), strict=True):
        assert picture.text == other.text
        assert np.array_equal(picture.pixels, other.pixels)
        assert not [note for note in picture.warnings if "graph" in note]


def test_where_no_step_can_be_captured_nothing_is_tried(
    family: Any, caplog: pytest.LogCaptureFixture
) -> None:
    captures = Captures()
    graphs = DecodeGraphs(family.network, plain_decode, captures, most_rows=0)
    with caplog.at_level(logging.WARNING):
        assert graphs.prepare(3) == 0
    assert captures.rows == []
    assert [r.message.split(" on this GPU")[0] for r in caplog.records] == [
        "decode steps run without a CUDA graph"
    ]


def test_what_fails_below_the_bound_is_told_in_lines_as_ever(family: Any) -> None:
    wrong = Captures(2, ValueError("no"))
    graphs = DecodeGraphs(family.network, plain_decode, wrong, most_rows=2)
    assert graphs.prepare(5) == 1
    assert graphs.degraded(1) == ""
    assert "2 rows (no)" in graphs.degraded(2) == graphs.degraded(5)


def test_rows_walk_through_all_smaller_numbers() -> None:
    assert buckets_up_to(0) == ()
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(11) == (*range(1, 11), 12)
    assert buckets_up_to(64) == buckets_up_to(1000) == BUCKETS
    assert len(BUCKETS) <= 16


def test_rows_without_a_job_have_one_id(family: Any) -> None:
    """What a step gives does not depend on the step before it, not even in rows nobody reads."""
    seen: list[Tensor] = []

    def capture(compute: Compute) -> Compute:
        def replay() -> Tensor:
            seen.append(compute())
            return seen[-1]

        return replay

    graphs = DecodeGraphs(family.network, plain_decode, capture)
    for first in (range(11), range(12)):
        buffers = [family.new_buffer() for _ in first]
        graphs([([20 + row], buffer) for row, buffer in zip(first, buffers, strict=True)])
    again = [family.new_buffer() for _ in range(11)]
    graphs([(torch.tensor([20 + row]), buffer) for row, buffer in enumerate(again)])
    assert torch.equal(seen[-1], seen[-3])
    assert not torch.equal(seen[-1], seen[-2])


def config(folder: Path, **batch: Any) -> RunConfig:
    choice = ModelChoice(device="cpu", dtype="float32", decode_graphs="on")
    return RunConfig(OutputConfig(folder), model=choice, batch=BatchConfig(**batch))


def ran(model: Any, jobs: list[ImageJob], config: RunConfig) -> list[Any]:
    with Session(config, load=lambda choice, *, is_batch_invariant: model) as session:
        return list(session.run(make_plan(jobs, registry.model_card)))


def test_prewarming_captures_what_the_run_will_use(
    family: Any, jobs: list[ImageJob], tmp_path: Path
) -> None:
    """Every number of rows up to those that think together, and none of them later."""
    captures = Captures()
    plain = [replace(job, custom_id=f"p{n}", bot_task="none") for n, job in enumerate(jobs)]
    events = ran(
        with_graphs(family, captures), [*jobs, *plain], config(tmp_path, max_size=5, prewarm=True)
    )
    (ready,) = [event for event in events if isinstance(event, Prewarmed)]
    # Three of six write.
    assert ready.graphs == 3
    assert captures.rows == [1, 2, 3]
    fewer = Captures()
    ran(with_graphs(family, fewer), jobs, config(tmp_path, max_size=2, prewarm=True))
    assert fewer.rows == [1, 2]


def test_without_prewarming_a_step_is_captured_when_it_is_wanted(
    family: Any, jobs: list[ImageJob], tmp_path: Path
) -> None:
    captures = Captures()
    events = ran(with_graphs(family, captures), jobs, config(tmp_path, prewarm=False))
    assert not [event for event in events if isinstance(event, Prewarmed)]
    assert captures.rows == [3, 2, 1]


def test_a_failed_capture_is_in_every_line_and_in_no_key(
    family: Any, jobs: list[ImageJob], tmp_path: Path
) -> None:
    lines = {}
    for name, captures in {
        "fails": Captures(1, torch.OutOfMemoryError("no room")),
        "works": Captures(),
    }.items():
        model = with_graphs(family, captures)
        events = ran(model, jobs, config(tmp_path, prewarm=True))
        lines[name] = {e.outcome.custom_id: e.outcome for e in events if is_done(e)}
        started = [n for n, event in enumerate(events) if isinstance(event, JobStarted)]
        assert len(started) == len(lines[name]) == 3
    for job in jobs:
        fails, works = lines["fails"][job.custom_id], lines["works"][job.custom_id]
        assert fails.key == works.key == key_of(job, [], config(tmp_path))
        assert fails.cot_token_ids == works.cot_token_ids
        (told,) = set(fails.warnings) - set(works.warnings)
        assert "no CUDA graph of a decode step of 1 row (out of memory)" in told


def test_a_model_that_decodes_otherwise_than_its_keys_say_is_refused(
    family: Any, jobs: list[ImageJob], tmp_path: Path
) -> None:
    on = config(tmp_path)
    off = replace(on, model=replace(on.model, decode_graphs="off"))
    for setting, model in ((on, family), (off, with_graphs(family, None))):
        with pytest.raises(MachineError, match="but the GPU driver's files") as raised:
            ran(model, jobs, setting)
        assert raised.value.code == "machine.graphs"
