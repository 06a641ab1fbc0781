"""Sessions with videos over ranks: the frames of one process, whatever becomes of a rank."""

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_tasks
import torch
import torch.distributed as dist
from engine.fake_video import frames_by_seed, video_job
from event_kinds import is_step
from parallel.test_when_ranks_fail import gone_within, is_alive
from rank_tasks import DiesOnMembers, Nothing, ShortVae, load_by
from tiny_video import write_wan

from hyimg_cli.engine.session import Session
from hyimg_cli.errors import Interrupted, MachineError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.videos import networks_need
from hyimg_cli.models import registry
from hyimg_cli.models.latent_video import SpreadModel
from hyimg_cli.pipelines import ranks as ranks_of
from hyimg_cli.pipelines.ranks import VideoRanks
from hyimg_cli.settings.run import (
    BatchConfig,
    FailurePolicy,
    ModelChoice,
    OutputConfig,
    ParallelConfig,
    ReuseConfig,
    RunConfig,
)
from hyimg_cli.spec.events import Event, JobEnded, ModelLoaded, Outcome
from hyimg_cli.spec.job import Size, VideoJob

COLD = BatchConfig(prewarm=False)
TALL = Size(272, 48)


def jobs_of(*names: str, **changes: Any) -> list[VideoJob]:
    """Videos that are cut into two tiles."""
    facts = {"size": TALL, "num_inference_steps": 2} | changes
    return [video_job(name, seed=number, **facts) for number, name in enumerate(names)]


def config(*, vae: int = 1, cfg: int = 1, **changes: Any) -> RunConfig:
    choice = ModelChoice(device="cpu", dtype="float32")
    facts: dict[str, Any] = {"batch": COLD, "model": choice} | changes
    return RunConfig(
        OutputConfig(Path("unused")), parallel=ParallelConfig(vae_ranks=vae, cfg_ranks=cfg), **facts
    )


def events_of(session: Session, jobs: list[VideoJob]) -> Iterator[Event]:
    return session.run(make_plan(jobs, registry.model_card))


@pytest.fixture
def latents(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    return frames_by_seed(monkeypatch)


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Process ids of the ranks, one list for each time that a model was spread."""
    found: list[list[int]] = []
    inner = VideoRanks.load

    def seen(self: VideoRanks, **what: bool) -> None:
        inner(self, **what)
        found.append(self._pool.member_pids)

    monkeypatch.setattr(VideoRanks, "load", seen)
    return found


def outcomes(events: Iterator[Event]) -> dict[str, Outcome]:
    return {e.outcome.custom_id: e.outcome for e in events if isinstance(e, JobEnded)}


@pytest.mark.thorough
def test_a_killed_rank_fails_its_job_and_no_other(
    latents: dict[int, Any], pids: list[list[int]]
) -> None:
    jobs = jobs_of("first", "second", "third", num_frames=1)
    with Session(config()) as alone:
        assert [one.parallel for one in outcomes(events_of(alone, jobs)).values()] == [None] * 3
    expected = dict(latents)
    latents.clear()
    found: dict[str, Outcome] = {}
    session = Session(config(vae=2, cfg=2))
    for event in events_of(session, jobs):
        if isinstance(event, ModelLoaded):
            assert event.ranks == 2
            # The terminal's Ctrl-C goes to this process's group alone.
            assert os.getpgid(pids[0][0]) != os.getpgid(0)
        if is_step(event) and (event.custom_id, event.done) == ("second", 1):
            os.kill(pids[0][0], signal.SIGKILL)
        if isinstance(event, JobEnded):
            found[event.outcome.custom_id] = event.outcome
    error = found["second"].error
    assert error is not None
    assert (error.code, error.retryable) == ("rank", True)
    assert error.message == "rank 1 failed: killed by signal 9"
    assert [found[name].status for name in ("first", "third")] == ["done", "done"]
    assert latents == {seed: expected[seed] for seed in (0, 2)}
    ranks = session._videos._ranks
    assert ranks is not None
    # A run that is stopped leaves the ranks to the session; one that is let go ends them.
    session.request_stop(signal.SIGINT)
    with pytest.raises(Interrupted):
        list(events_of(session, jobs))
    last = ranks._pool.member_pids
    assert is_alive(last[0])
    del session, ranks, event
    gc.collect()
    assert gone_within(last, 60)


@pytest.mark.thorough
def test_ranks_go_down_the_ladder_of_a_short_decode_together(
    latents: dict[int, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 1 finds no memory twice: again without transformers on any rank, then in smaller tiles
    on both; the next job has its branches and its own tiles again.
    """
    jobs = jobs_of("first", "second", num_frames=1)
    with Session(config()) as alone:
        list(events_of(alone, jobs))
    own = dict(latents)
    halved = ModelChoice(device="cpu", dtype="float32", decode_tiles="half")
    with Session(config(model=halved)) as alone:
        list(events_of(alone, jobs[:1]))
    expected = own | {0: latents[0]}
    assert own != expected
    short = tmp_path / "short"
    short.mkdir()
    for name in "ab":
        (short / name).touch()
    monkeypatch.setattr(ranks_of, "load_vae", partial(load_by, partial(ShortVae, short)))
    held: list[Any] = []
    inner = VideoRanks.release_branches

    def released(self: VideoRanks) -> None:
        inner(self)
        held.append(self._pool.run(rank_tasks.parts))

    monkeypatch.setattr(VideoRanks, "release_branches", released)
    with Session(config(vae=2, cfg=2)) as session:
        found = outcomes(events_of(session, jobs))
        assert session._videos._ranks is not None
        assert {"transformer", "vae"} <= {*session._videos._ranks._pool.run(rank_tasks.parts)[1]}
    assert [parts[1] for parts in held] == [["vae"]]
    assert latents == expected
    notes = found["first"].warnings
    assert ["transformer" in notes[0], "tiles of 128 pixels" in notes[1]] == [True, True]
    assert found["second"].warnings == ()
    for one in found.values():
        assert one.parallel is not None
        assert one.parallel.branch_ranks == 2
        assert one.parallel.decode is not None
        assert all(rank.tiles for rank in one.parallel.decode.ranks)


@pytest.mark.thorough
def test_behind_a_rank_that_died_in_the_decode_the_next_attempt_only_decodes(
    pids: list[list[int]], tmp_path: Path
) -> None:
    plan = make_plan(jobs_of("job", num_frames=1), registry.model_card)
    with RunFolder(tmp_path / "alone") as folder, Session(config()) as session:
        alone = outcomes(session.run(plan, folder))["job"]
    retry, steps = FailurePolicy(max_retries=1), 0
    found: dict[str, Outcome] = {}
    with (
        RunFolder(tmp_path / "spread") as folder,
        Session(config(vae=2, failure=retry)) as session,
    ):
        for event in session.run(plan, folder):
            if is_step(event):
                steps += 1
                if event.done == event.total:
                    os.kill(pids[0][0], signal.SIGKILL)
            if isinstance(event, JobEnded):
                found[event.outcome.custom_id] = event.outcome
    job = found["job"]
    assert (job.status, job.attempt, job.denoise_steps, steps) == ("done", 2, 0, 2)
    assert job.outputs[0].pixel_sha256 == alone.outputs[0].pixel_sha256


@pytest.mark.thorough
def test_wan_over_ranks_is_wan(
    tmp_path: Path, latents: dict[int, Any], pids: list[list[int]]
) -> None:
    """Two transformers, a scheduler that remembers, a VAE of its own rule."""
    model = str(write_wan(tmp_path / "wan", boundary_ratio=0.9))
    jobs = jobs_of("job", model=model, size=Size(272, 32), num_frames=5, num_inference_steps=3)
    with Session(config()) as alone:
        assert outcomes(events_of(alone, jobs))["job"].status == "done"
    expected = dict(latents)
    with Session(config(vae=3, cfg=2)) as session:
        (outcome,) = outcomes(events_of(session, jobs)).values()
    assert latents == expected
    assert outcome.parallel is not None
    assert outcome.parallel.branch_ranks == 2
    assert outcome.parallel.decode is not None
    assert [one.tiles for one in outcome.parallel.decode.ranks] == [1, 1, 0]
    assert gone_within(pids[0], 60)


@pytest.mark.thorough
def test_models_with_ranks_take_turns_and_replace_what_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Still(SpreadModel):
        device, vae, decoder = torch.device("cpu"), "a VAE", None

        def __init__(self) -> None:
            """Nothing."""

    monkeypatch.setattr(Still, "__abstractmethods__", frozenset())
    monkeypatch.setattr(ranks_of, "load_vae", partial(load_by, Nothing))
    first, second = (
        VideoRanks(Still(), ModelChoice(), ParallelConfig(vae_ranks=2)) for _ in range(2)
    )
    first.load()
    # One that ends while nobody needs it is replaced.
    (idle,) = first._pool._members
    idle.child.process.kill()
    idle.child.process.wait()
    first.revive()
    before = first._pool.member_pids
    assert before != [idle.child.process.pid]
    assert is_alive(before[0])
    second.load()
    assert not first._pool.member_pids
    assert gone_within(before, 60)
    last = second._pool.member_pids
    assert is_alive(last[0])
    second.stop()
    assert gone_within(last, 60)


def test_a_rank_that_dies_while_it_loads_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_of, "load_vae", partial(load_by, DiesOnMembers))
    with (
        Session(config(vae=2)) as session,
        pytest.raises(MachineError, match="did not load the model: rank 1 failed: killed"),
    ):
        list(events_of(session, jobs_of("job")))
    assert not dist.is_initialized()


def test_rank_0_is_on_the_first_gpu() -> None:
    class Elsewhere:
        device = torch.device("cuda:1")

    with pytest.raises(MachineError, match="rank 0 would be on cuda:1") as raised:
        VideoRanks(Elsewhere(), ModelChoice(), ParallelConfig(vae_ranks=2))  # type: ignore[arg-type]
    assert "CUDA_VISIBLE_DEVICES" in raised.value.hint


def test_weights_of_every_rank_lie_in_main_memory() -> None:
    card = registry.video_card(registry.EMBEDDED_VIDEO)
    sizes = (("transformer", 100), ("vae", 10), ("text_encoder", 1000))
    card = replace(card, component_bytes=sizes, component_parameters=())
    assert networks_need(card, config()).total == 1000, "the encoders go before the others come"
    split = config(vae=4, cfg=2)
    assert networks_need(card, split).total == 1000
    each_time = replace(split, reuse=ReuseConfig(prompt_cache=False))
    assert networks_need(card, each_time).total == 1000 + 4 * 10 + 2 * 100, "they come back"
    card = replace(card, component_bytes=sizes[:2])
    assert networks_need(card, split).total == 4 * 10 + 2 * 100
