"""Sessions whose model is split over ranks: the pictures of one process, even if a rank fails."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from event_kinds import is_step
from parallel.test_when_ranks_fail import gone_within, is_alive

from hyimg_cli.engine.session import Session
from hyimg_cli.errors import MachineError, RankError, UsageError
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.footprint import held_weights
from hyimg_cli.models import registry
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.pipelines import ranks as ranks_of
from hyimg_cli.pipelines.image.pipeline import ImagePipeline
from hyimg_cli.settings.run import (
    BatchConfig,
    FailurePolicy,
    ModelChoice,
    OutputConfig,
    ParallelConfig,
    RunConfig,
)
from hyimg_cli.spec.events import JobEnded, ModelLoaded, Outcome
from hyimg_cli.spec.job import ImageJob

NAMES = ("first", "second", "third")


def config(ranks: int, *, sets: int = 1, **choice: Any) -> RunConfig:
    facts = {"device": "cpu", "dtype": "float32"} | choice
    return RunConfig(
        OutputConfig(Path("unused")),
        model=ModelChoice(**facts),
        batch=BatchConfig(prewarm=False),
        parallel=ParallelConfig(tensor_ranks=ranks, cfg_ranks=sets),
        failure=FailurePolicy(max_retries=1),
    )


@pytest.fixture
def jobs(job: ImageJob, sources: tuple[str, ...]) -> list[ImageJob]:
    """Two that share an edited picture and one that is drawn from text; all of them think."""
    edit = replace(job, task="it2i", images=sources[:1], seed=8)
    kinds = (edit, replace(edit, prompt="make it green"), job)
    return [replace(one, custom_id=name) for name, one in zip(NAMES, kinds, strict=True)]


@pytest.fixture
def pixels(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """By id, the pictures that were made last: without an output folder nothing keeps them."""
    made: dict[str, np.ndarray] = {}
    inner = ImagePipeline.line_fields

    def seen(self: ImagePipeline, done: Any) -> Any:
        made[done.job.custom_id] = done.pixels
        return inner(self, done)

    monkeypatch.setattr(ImagePipeline, "line_fields", seen)
    return made


def ran(
    session: Session, jobs: list[ImageJob], at: Callable[[Any], None] = lambda event: None
) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for event in session.run(make_plan(jobs, registry.model_card)):
        at(event)
        if isinstance(event, JobEnded):
            found[event.outcome.custom_id] = event.outcome
    return found


@pytest.mark.thorough
def test_pictures_are_those_of_one_process_whatever_becomes_of_a_rank(
    jobs: list[ImageJob], pixels: dict[str, np.ndarray]
) -> None:
    # The last two draw one text, by different seeds.
    jobs = [*jobs, replace(jobs[-1], custom_id="fourth", seed=99)]
    loads: list[ModelLoaded] = []
    with Session(config(1)) as alone:
        expected = ran(alone, jobs, lambda event: _keep(event, loads))
    plain = dict(pixels)
    session = Session(config(2))
    lines = ran(session, jobs, lambda event: _keep(event, loads))
    assert [one.ranks for one in loads] == [1, 2]
    assert loads[0].parameters == loads[1].parameters
    together = dict(pixels)
    for name, line in lines.items():
        assert (line.status, line.batch) == ("done", expected[name].batch)
        assert line.parallel is not None
        assert line.parallel.tensor_ranks == 2
        assert line.cot_token_ids == expected[name].cot_token_ids
        assert line.kv_reuse == expected[name].kv_reuse
        assert line.cot_from == expected[name].cot_from == ("third" if name == "fourth" else None)
        # Sums of two parts round otherwise than one product: no level moves by more than one.
        assert np.abs(together[name].astype(int) - plain[name]).max() <= 1

    # Alone and unshared: the bits of batched and shared ones.
    for one in jobs:
        session.forget()
        assert ran(session, [one])[one.custom_id].status == "done"
    assert _same(pixels, together)

    # A rank that dies takes what works with it: those are tried again, with ranks that are new.
    first = _pids(session)
    died = ran(session, jobs, lambda event: _kill_at(event, first[0]))
    assert {line.status for line in died.values()} == {"done"}
    assert {line.attempt for line in died.values()} >= {2}
    assert _same(pixels, together)
    assert gone_within(first, 60)

    # Another pool's turn: what the tree holds is of no use without the ranks' parts, and is gone.
    second, tree = _pids(session), session._images.tree
    assert second
    assert len(tree)
    ranks_of.take(RankPool(1))
    assert not len(tree)
    assert gone_within(second, 60)
    session.close()


@pytest.mark.thorough
def test_branches_on_ranks_of_their_own_draw_the_pictures_of_one_process(
    jobs: list[ImageJob], pixels: dict[str, np.ndarray]
) -> None:
    """To the bit; thinking or not, guided or not, again behind a rank that died, and on 2 x 2."""
    plain = [replace(one, custom_id=f"{one.custom_id} plain", bot_task="none") for one in jobs]
    jobs = [*jobs, *plain, replace(plain[0], custom_id="unguided", guidance_scale=1.0)]
    with Session(config(1)) as alone:
        expected = ran(alone, jobs)
    one_process = dict(pixels)
    with Session(config(1, sets=2)) as session:
        lines = ran(session, jobs)
        assert _same(pixels, one_process)
        for name, line in lines.items():
            assert line.cot_token_ids == expected[name].cot_token_ids
            assert line.parallel is not None
            assert (line.parallel.branch_ranks, line.parallel.tensor_ranks) == (2, 1)
            if "plain" not in name:
                assert line.kv_reuse == expected[name].kv_reuse
        (pid,) = _pids(session)
        died = ran(session, jobs, lambda event: _kill_at(event, pid))
        assert {line.status for line in died.values()} == {"done"}
        assert {line.attempt for line in died.values()} >= {2}
        assert _same(pixels, one_process)
    with Session(config(2, sets=2)) as session:
        ran(session, jobs)
    for name, picture in pixels.items():
        assert np.abs(picture.astype(int) - one_process[name]).max() <= 1


def _keep(event: Any, loads: list[ModelLoaded]) -> None:
    if isinstance(event, ModelLoaded):
        loads.append(event)


def _kill_at(event: Any, pid: int) -> None:
    if is_step(event) and event.done == 1 and is_alive(pid):
        os.kill(pid, signal.SIGKILL)


def _pids(session: Session) -> list[int]:
    ranks = session._images._ranks
    assert ranks is not None
    return ranks._pool.member_pids


def _same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    assert found.keys() == expected.keys()
    return all(np.array_equal(found[name], picture) for name, picture in expected.items())


def test_a_rank_that_dies_while_it_loads_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, jobs: list[ImageJob]
) -> None:
    monkeypatch.setattr(ranks_of.registry, "load", _dies)
    session = Session(config(2))
    with pytest.raises(MachineError, match="did not load the model: rank 1 failed: killed"):
        ran(session, jobs)
    last = _pids(session)
    session.close()
    assert gone_within(last, 60)


def _dies(*_: Any, **__: Any) -> Any:
    raise RankError("rank 1 failed: killed by signal 9", retryable=True)


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, jobs: list[ImageJob]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MachineError, match="2 ranks need 2 GPUs; torch finds 1") as raised:
        ran(Session(config(2, device="cuda")), jobs)
    assert raised.value.exit_code == 3


@pytest.mark.parametrize(
    ("ranks", "choice", "what"),
    [
        (3, {}, "2 kv heads with 3 query heads each cannot be split over 3 ranks"),
        (2, {"device": "balanced"}, "--device balanced cannot be used with 2 processes"),
        (2, {"device": "cuda:1"}, "counted from the first"),
        (2, {"decode_graphs": "on"}, "decode_graphs needs one process"),
        (2, {"quantization": "nf4"}, "nf4 needs rows that are multiples of 64 weights"),
    ],
)
def test_what_cannot_be_split_is_refused_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch,
    jobs: list[ImageJob],
    ranks: int,
    choice: dict[str, Any],
    what: str,
) -> None:
    def started(*_: Any, **__: Any) -> Iterator[None]:
        raise AssertionError("refused before")

    monkeypatch.setattr(ranks_of, "RankPool", started)
    with pytest.raises(UsageError, match=what):
        ran(Session(config(ranks, **choice)), jobs)


def test_weights_of_every_rank_lie_in_main_memory() -> None:
    card = registry.model_card(registry.EMBEDDED)
    alone = held_weights(card, config(1))
    held = registry.sequences(registry.EMBEDDED).rank_bytes(2, "float32", "none")
    first, other = held.first, held.other
    assert held_weights(card, config(2)) == first + other
    # Routers and norms are there twice, nothing else.
    assert alone < first + other < 1.01 * alone
