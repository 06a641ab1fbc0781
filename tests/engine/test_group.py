"""Jobs in company: the same pixels as alone, shared prefixes counted, failures kept apart."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

import numpy as np
import pytest
import torch
from conftest import diagonal
from engine.conftest import studio_of

from hyimg_cli.errors import OutputError
from hyimg_cli.kernels.transfer import Readback
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.kv.tree import Host, KVTree
from hyimg_cli.memory.footprint import Together, needs
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages
from hyimg_cli.pipelines.image.think import DecodeRequest
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.settings.run import ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest

SQUARE = SizeRequest(64, 64)
Tell = Callable[..., Any]


def _run(
    jobs: list[ImageJob],
    studio: ImageStages,
    size: int,
    read_lag: int = 0,
    draw_size: int | None = None,
) -> dict[str, ImageRequest | Lost]:
    run = ContinuousBatch(
        WholeBatches(map(Ticket, jobs), studio, lambda since: PhaseClock(since, lambda: None)),
        Together(size, draw_size or size),
        read_lag=read_lag,
    )
    ends = [event for event in run.run() if isinstance(event, ImageRequest | Lost)]
    assert sorted(end.job.custom_id for end in ends) == sorted(job.custom_id for job in jobs)
    return {end.job.custom_id: end for end in ends}


def _pixels(ends: dict[str, ImageRequest | Lost]) -> dict[str, bytes]:
    return {
        name: end.pixels.tobytes() for name, end in ends.items() if isinstance(end, ImageRequest)
    }


@pytest.fixture
def mixed(job: ImageJob, sources: tuple[str, ...]) -> list[ImageJob]:
    """Unlike jobs: texts of several lengths, none, edits, two sources, other steps and guidance."""
    words = [2, 11, 5, 17, 1, 8]
    writing = [
        replace(
            job,
            custom_id=f"writes-{n}",
            prompt="a red circle " * (n % 3 + 1),
            seed=n,
            images=sources[: n % 3],
            text=replace(job.text, max_new_tokens=count, temperature=1.0),
            ar_seed=n,
        )
        for n, count in enumerate(words)
    ]
    plain = [
        replace(job, custom_id=f"plain-{n}", seed=n, bot_task="none", size=SQUARE, images=images)
        for n, images in enumerate([(), sources[:1], sources[:1], sources[1:]])
    ]
    other = [
        replace(plain[0], custom_id="five-steps", num_inference_steps=5),
        replace(plain[0], custom_id="no-guidance", guidance_scale=1.0),
        replace(plain[0], custom_id="other-shift", flow_shift=4.0),
    ]
    return [*writing, *plain, *other]


def _alone(jobs: list[ImageJob], model: Any) -> dict[str, bytes]:
    studio = studio_of(model)
    return {name: px for job in jobs for name, px in _pixels(_run([job], studio, 1)).items()}


@pytest.fixture(scope="module")
def _made_alone() -> dict[str, bytes]:
    return {}


@pytest.fixture
def alone(family: Any, mixed: list[ImageJob], _made_alone: dict[str, bytes]) -> dict[str, bytes]:
    """Pixels of each of `mixed` in a run of its own, made once."""
    if not _made_alone:
        _made_alone |= _alone(mixed, family)
    return dict(_made_alone)


@pytest.mark.parametrize(("size", "budget"), diagonal((2, 5, 16), (0, 300_000, 10**9)))
def test_same_pixels_in_any_batch_order_and_tree(
    family: Any, mixed: list[ImageJob], alone: dict[str, bytes], size: int, budget: int
) -> None:
    """To the bit: alone, together, backwards, with prefixes shared, evicted, or never kept.

    No tree, one that evicts, one that holds all: every size meets each, in one of both orders.
    """
    is_backwards = (size == 5) != (budget == 300_000)
    jobs = mixed[::-1] if is_backwards else mixed
    assert _pixels(_run(jobs, studio_of(family, tree=KVTree(budget)), size)) == alone


def test_same_pixels_from_a_tree_that_other_jobs_filled(
    family: Any, mixed: list[ImageJob], alone: dict[str, bytes]
) -> None:
    studio = studio_of(family, tree=KVTree(10**9))
    assert _pixels(_run(mixed[:5], studio, 5)) == {
        j.custom_id: alone[j.custom_id] for j in mixed[:5]
    }
    assert _pixels(_run(mixed[::-1], studio, 5)) == alone


def test_same_pixels_with_prefixes_spilled_to_main_memory(
    family: Any, mixed: list[ImageJob], alone: dict[str, bytes]
) -> None:
    host = Host[Any](
        10**9, spill=lambda rows: rows.to_host(), restore=lambda rows: rows.to_device()
    )
    tree = KVTree(200_000, host=host)
    studio = studio_of(family, tree=tree)
    assert _pixels(_run(mixed, studio, 4)) == alone
    assert tree.host_bytes > 0
    assert _pixels(_run(mixed, studio, 4)) == alone


def _drawn(ends: dict[str, ImageRequest | Lost]) -> dict[str, ImageRequest]:
    return {name: end for name, end in ends.items() if isinstance(end, ImageRequest)}


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.thorough), 5])
def test_ids_that_are_read_a_step_late_change_nothing(
    family: Any, mixed: list[ImageJob], size: int
) -> None:
    """Texts, counts and pixels to the bit; the rows decoded in vain are counted apart."""
    longer = [replace(j, text=replace(j.text, max_new_tokens=60)) for j in mixed[:4]]
    jobs = [*longer, *mixed[4:]]
    at_once = _drawn(_run(jobs, studio_of(family), size))
    late = _drawn(_run(jobs, studio_of(family), size, read_lag=1))
    surplus = 0
    for name, end in at_once.items():
        other = late[name]
        assert other.pixels.tobytes() == end.pixels.tobytes()
        assert other.text == end.text
        assert end.reuse.ar_surplus_tokens == 0
        assert replace(other.reuse, ar_surplus_tokens=0) == end.reuse
        surplus += other.reuse.ar_surplus_tokens
    assert surplus >= 4, "texts that end by themselves have one row behind them"


def test_what_is_taken_back_uses_up_no_draw(family: Any, job: ImageJob) -> None:
    """Hot texts go on behind `</think>` with the draws they have when nothing is read late."""
    jobs = [
        replace(
            job,
            custom_id=f"{n}",
            num_inference_steps=1,
            ar_seed=n,
            text=replace(job.text, temperature=2.5, top_p=1.0, max_new_tokens=60),
        )
        for n in range(12)
    ]
    at_once, late = (_drawn(_run(jobs, studio_of(family), 12, lag)) for lag in (0, 1))
    texts = {name: end.text for name, end in at_once.items()}
    assert {name: end.text for name, end in late.items()} == texts
    assert len({written.text for written in texts.values()}) > 6
    assert sum(end.reuse.ar_surplus_tokens == 2 for end in late.values()) > 2


def test_failing_neighbours_change_nothing(
    family: Any, mixed: list[ImageJob], alone: dict[str, bytes], tmp_path: Any
) -> None:
    broken = [
        replace(mixed[2], custom_id="no-file", images=(str(tmp_path / "missing.png"),)),
        replace(mixed[0], custom_id="control", prompt="<img>"),
    ]
    ends = _run([broken[0], *mixed[:5], broken[1], *mixed[5:]], studio_of(family), 4)
    assert {name for name, end in ends.items() if isinstance(end, Lost)} == {"no-file", "control"}
    assert _pixels(ends) == alone


def test_shared_prefixes_are_computed_once(
    family: Any, job: ImageJob, sources: tuple[str, ...]
) -> None:
    """Sixteen edits of one picture: counted rows are one prefix plus every job's own rest."""
    jobs = [
        replace(
            job,
            custom_id=f"edit-{n}",
            images=sources[:1],
            prompt="make it " + "very " * n + "blue",
            bot_task="recaption",
            text=replace(job.text, max_new_tokens=3),
        )
        for n in range(16)
    ]
    ends = _run(jobs, studio_of(family, tree=KVTree(10**9)), 8)
    reports = [end.reuse for end in ends.values() if isinstance(end, ImageRequest)]
    lengths = [r.ar_prefill_tokens + r.ar_shared_tokens for r in reports]
    prefix = max(r.ar_shared_tokens for r in reports)
    computed = sum(r.ar_prefill_tokens for r in reports)
    assert computed == prefix + sum(length - prefix for length in lengths)
    for report in reports:
        positive, negative = report.branches
        assert positive.reused > prefix
        # The negative row takes the same prefix from its own job's context.
        assert negative.reused == prefix
    alone = _alone(jobs[:2], family)
    assert {n: px for n, px in _pixels(ends).items() if n in alone} == alone


def test_jobs_without_text_share_through_the_tree(
    family: Any, job: ImageJob, sources: tuple[str, ...]
) -> None:
    jobs = [
        replace(
            job,
            custom_id=f"edit-{n}",
            images=sources[:1],
            prompt=f"make it {word}",
            bot_task="none",
            size=SQUARE,
        )
        for n, word in enumerate(["blue", "red", "green"])
    ]
    ends = _run(jobs, studio_of(family, tree=KVTree(10**9)), 3)
    first, *others = [ends[j.custom_id].reuse.branches for j in jobs]
    assert first[0].shared == 0
    assert all(branches[0].shared == first[1].shared > 0 for branches in others)


def test_seeds_of_one_prompt_compute_its_prefix_once(family: Any, job: ImageJob) -> None:
    jobs = [
        replace(job, custom_id=f"seed-{n}", seed=n, bot_task="none", size=SQUARE) for n in range(3)
    ]
    ends = _run(jobs, studio_of(family, tree=KVTree(10**9)), 3)
    _, *others = [ends[j.custom_id].reuse.branches for j in jobs]
    for branches in others:
        assert [branch.computed for branch in branches] == [1, 1]


@pytest.mark.parametrize("read_lag", [0, 1])
def test_rows_counted_by_a_hook_are_those_of_the_lines(
    family: Any, mixed: list[ImageJob], read_lag: int
) -> None:
    rows: list[int] = []
    hook = family.network.model.register_forward_pre_hook(
        lambda _module, arguments: rows.append(arguments[0].shape[0])
    )
    ends = _run(mixed, studio_of(family, tree=KVTree(10**9)), 6, read_lag)
    hook.remove()
    told = 0
    for end in ends.values():
        assert isinstance(end, ImageRequest)
        report, steps = end.reuse, end.denoise_steps
        told += report.ar_prefill_tokens + report.ar_decode_tokens + report.ar_surplus_tokens
        told += sum(branch.computed + steps * branch.per_step for branch in report.branches)
    assert sum(rows) == told


@pytest.mark.parametrize("read_lag", [0, 1])
def test_a_batch_that_does_not_fit_goes_on_in_halves(
    family: Any,
    mixed: list[ImageJob],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    read_lag: int,
) -> None:
    velocity, feed = family.network.velocity, family.network.feed

    def small(limit: int, original: Any) -> Any:
        def limited(items: Any) -> Any:
            if len(items) > limit:
                raise torch.OutOfMemoryError("too many rows")
            return original(items)

        return limited

    monkeypatch.setattr(family.network, "velocity", small(2, velocity))
    monkeypatch.setattr(family.network, "feed", small(3, feed))
    ends = _run(mixed, studio_of(family), 8, read_lag)
    assert _pixels(ends) == alone
    noted = [e for e in ends.values() if isinstance(e, ImageRequest) and e.warnings]
    assert any("out of memory" in note for end in noted for note in end.warnings)


def test_a_fault_in_a_batch_fails_its_own_job_alone(
    family: Any,
    mixed: list[ImageJob],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    velocity = family.network.velocity

    def faulty(pictures: Any) -> Any:
        if any(live.guidance == 1.0 for live in pictures):
            raise RuntimeError("cannot draw this one")
        return velocity(pictures)

    monkeypatch.setattr(family.network, "velocity", faulty)
    ends = _run(mixed, studio_of(family), 16)
    assert [name for name, end in ends.items() if isinstance(end, Lost)] == ["no-guidance"]
    del alone["no-guidance"]
    assert _pixels(ends) == alone


@pytest.mark.parametrize("read_lag", [0, 1])
def test_a_failed_choice_is_made_again(
    family: Any,
    mixed: list[ImageJob],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    read_lag: int,
) -> None:
    """Tokens were fed, their successors were not chosen: nothing is fed twice, none is lost."""
    expected = {job.custom_id: alone[job.custom_id] for job in mixed[:6]}
    logits, calls = family.network.text_logits, iter(range(10**6))

    def failing(hidden: Any) -> Any:
        if next(calls) % 3 == 2 and len(hidden) > 1:
            raise RuntimeError("no logits this time")
        return logits(hidden)

    monkeypatch.setattr(family.network, "text_logits", failing)
    ends = _run(mixed[:6], studio_of(family), 6, read_lag)
    assert _pixels(ends) == expected


@pytest.mark.parametrize(("read_lag", "is_launched"), diagonal([0, 1], [True, False]))
def test_tokens_that_cannot_be_read_fail_the_jobs_that_wait_for_them(
    family: Any,
    mixed: list[ImageJob],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    read_lag: int,
    is_launched: bool,
) -> None:
    """Also where they are read because the next step has failed."""
    logits, values, faults = family.network.text_logits, Readback.values, ["no ids this time"]
    failing = iter([False, False, True])

    def no_logits(hidden: Any) -> Any:
        if not is_launched and next(failing, False):
            raise RuntimeError("no logits this time")
        return logits(hidden)

    def no_ids(self: Readback) -> list[int]:
        if faults and (is_launched or next(failing, None) is None):
            raise OutputError(faults.pop(), code="output-image.test")
        return values(self)

    monkeypatch.setattr(family.network, "text_logits", no_logits)
    monkeypatch.setattr(Readback, "values", no_ids)
    ends = _run(mixed[:6], studio_of(family), 2, read_lag)
    lost = {name: end.error for name, end in ends.items() if isinstance(end, Lost)}
    assert 1 <= len(lost) <= 2
    assert {getattr(error, "code", "") for error in lost.values()} == {"output-image.test"}
    expected = {job.custom_id: alone[job.custom_id] for job in mixed[:6]}
    assert _pixels(ends) == {name: px for name, px in expected.items() if name not in lost}


@pytest.mark.parametrize("read_lag", [0, 1])
def test_a_token_that_cannot_be_written_fails_its_own_job(
    family: Any,
    mixed: list[ImageJob],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    read_lag: int,
) -> None:
    accept, calls = DecodeRequest.accept, iter(range(10**6))

    def failing(self: DecodeRequest, choice: Any, *read: Any) -> None:
        if next(calls) == 4:
            raise RuntimeError("what follows it is not known")
        accept(self, choice, *read)

    monkeypatch.setattr(DecodeRequest, "accept", failing)
    ends = _run(mixed[:6], studio_of(family), 6, read_lag)
    (lost,) = [name for name, end in ends.items() if isinstance(end, Lost)]
    expected = {job.custom_id: alone[job.custom_id] for job in mixed[:6] if job.custom_id != lost}
    assert _pixels(ends) == expected


def test_lines_name_their_batch(family: Any, mixed: list[ImageJob]) -> None:
    ends = _run(mixed, studio_of(family), 16)
    batches = {name: end.batch for name, end in ends.items() if isinstance(end, ImageRequest)}
    assert batches["writes-0"]["think"] == 6
    assert batches["plain-0"]["denoise"] == batches["plain-1"]["denoise"] > 1
    assert batches["five-steps"]["denoise"] == batches["plain-0"]["denoise"], "whatever their steps"


def test_memory_returns_to_its_start(family: Any, mixed: list[ImageJob]) -> None:
    import gc
    import weakref

    from hyimg_cli.kv import buffer

    gc.collect()
    alive, held = weakref.WeakSet[Any](), family.arena.pages.used
    original = buffer.Buffer.__init__

    def counted(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        alive.add(self)

    buffer.Buffer.__init__ = counted  # type: ignore[method-assign]
    try:
        tree: KVTree[Any] = KVTree(10**9)
        _run(mixed[:4], studio_of(family, tree=tree), 4)
        gc.collect()
        assert not alive
        tree.clear()
        assert tree.held_bytes == 0
        assert family.arena.pages.used <= held, "other tests may hold some"
    finally:
        buffer.Buffer.__init__ = original  # type: ignore[method-assign]


def test_equal_branches_are_one(family: Any, job: ImageJob, drawn: Tell) -> None:
    """A prompt that is all `<cfg>` has one context, and guidance between equals changes nothing."""
    job = replace(job, bot_task="none", size=SQUARE)
    canvas_of = family.canvas
    family.canvas = lambda *a: (
        canvas := canvas_of(*a),
        replace(canvas, branches=(canvas.branches[1],) * 2),
    )[1]
    try:
        report = drawn(job).picture.reuse
    finally:
        del family.canvas
    assert len(report.branches) == 1
    assert np.isfinite(report.branches[0].computed)


@pytest.mark.parametrize(("think", "draw"), [(4, 1), (2, 3)])
def test_same_pixels_whatever_number_thinks_and_draws(
    family: Any, mixed: list[ImageJob], think: int, draw: int
) -> None:
    jobs = [*mixed[:3], *mixed[6:9]]
    expected = _alone(jobs, family)
    ends = _run(jobs, studio_of(family, tree=KVTree(10**9)), think, draw_size=draw)
    assert _pixels(ends) == expected
    batches = [end.batch for end in _drawn(ends).values()]
    assert max(batch["think"] for batch in batches) == min(think, 3)
    assert max(batch["denoise"] for batch in batches) == draw


def _alike(job: ImageJob, count: int) -> list[ImageJob]:
    """Jobs whose texts end together, at their limit."""
    return [
        replace(
            job,
            custom_id=f"{n}",
            seed=n,
            num_inference_steps=1,
            size=SQUARE,
            bot_task="recaption",
            text=replace(job.text, max_new_tokens=3),
            ar_seed=n,
        )
        for n in range(count)
    ]


class _Buffers:
    """K/V buffers that are alive, and the most slots that were held at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        self.alive: WeakSet[Buffer] = WeakSet()
        self._arena = model.arena
        self._arena.pages.peak = self._before = self._arena.pages.used
        original = Buffer.__init__

        def counted(buffer: Buffer, *arguments: Any) -> None:
            original(buffer, *arguments)
            self.alive.add(buffer)

        monkeypatch.setattr(Buffer, "__init__", counted)

    @property
    def most(self) -> int:
        """Bytes, without what other tests hold."""
        pages = self._arena.pages.peak - self._before
        return int(pages * self._arena.page * self._arena.storage.row_bytes)


@pytest.mark.parametrize(("think", "draw"), [(3, 1), (3, 2)])
def test_no_more_kv_is_held_than_the_plan_counts(
    family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch, think: int, draw: int
) -> None:
    """And no less: texts go to their limits, and one that is shorter fills the waiting room."""
    jobs = _alike(job, 7)
    jobs[0] = replace(jobs[0], text=replace(job.text, max_new_tokens=1))
    config = RunConfig(OutputConfig(Path()), model=ModelChoice(device="cpu", dtype="float32"))
    card = replace(family.card, vae_bytes_per_pixel=0)
    counted = needs(jobs, card, config, prefixes=0).widest(Together(think, draw))
    assert counted.moment == "draw"
    buffers = _Buffers(monkeypatch, family)
    assert len(_drawn(_run(jobs, studio_of(family), think, draw_size=draw))) == 7
    # A sequence ends within a page.
    rounding = 2 * (think + draw) * family.arena.page * family.arena.storage.row_bytes
    assert 0.85 * counted.kv <= buffers.most <= counted.kv + rounding
    assert not buffers.alive


def test_branches_that_do_not_fit_wait_with_their_contexts(
    family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for the branches of two jobs: all are drawn all the same, two at a time."""
    jobs = _alike(job, 5)
    expected = _pixels(_run(jobs, studio_of(family), 5))
    new_branch, alive = family.network.branch, [0]

    def branch(layout: Any, buffer: Any) -> Any:
        if alive[0] == 4:
            raise torch.OutOfMemoryError("no room for another branch")
        made = new_branch(layout, buffer)
        alive[0] += 1
        finalize(made, lambda: alive.__setitem__(0, alive[0] - 1))
        return made

    monkeypatch.setattr(family.network, "branch", branch)
    ends = _drawn(_run(jobs, studio_of(family), 5, draw_size=4))
    assert _pixels(dict(ends)) == expected
    assert [end.batch["denoise"] for end in ends.values()] == [2, 2, 2, 2, 1]
    assert [end.batch["think"] for end in ends.values()] == [5] * 5
    assert "not enough memory to draw more than 2 together" in ends["0"].warnings
    assert not ends["4"].warnings


def test_memory_for_drawing_says_nothing_of_thinking(
    family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    velocity = family.network.velocity

    def small(pictures: Any) -> Any:
        if len(pictures) > 1:
            raise torch.OutOfMemoryError("too many rows")
        return velocity(pictures)

    monkeypatch.setattr(family.network, "velocity", small)
    ends = _drawn(_run(_alike(job, 6), studio_of(family), 3))
    batches = [ends[f"{n}"].batch for n in range(6)]
    assert [batch["think"] for batch in batches] == [3] * 6
    assert [batch["denoise"] for batch in batches] == [1] * 6
