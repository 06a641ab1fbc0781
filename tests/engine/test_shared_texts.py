"""One decode and n drawings: texts and pixels are those of jobs that write their text each."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import diagonal
from engine.conftest import studio_of
from event_kinds import is_token

from hyimg_cli.kv.buffer import Rows
from hyimg_cli.kv.tree import Host, KVTree
from hyimg_cli.manifest.written import note
from hyimg_cli.memory.footprint import Together
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image import stages as stages_of
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages
from hyimg_cli.pipelines.image.think import Texts
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.spec.events import JobStarted
from hyimg_cli.spec.job import ImageJob, SizeRequest

SQUARE = SizeRequest(64, 64)
Ends = dict[str, ImageRequest | Lost[ImageJob]]


@pytest.fixture
def jobs(job: ImageJob, sources: tuple[str, ...]) -> list[ImageJob]:
    """Four texts: a sampled one of three seeds, greedy edits that differ in seed and steps, one in
    a size of its own, and one that nobody shares; mixed up.
    """
    sampled = [replace(job, custom_id=f"sampled-{n}", seed=n) for n in range(3)]
    greedy = replace(job.text, temperature=0.0, max_new_tokens=9)
    edits = [
        replace(
            job,
            custom_id=f"edit-{n}",
            images=sources[:1],
            prompt="make it blue",
            bot_task="recaption",
            num_inference_steps=2 + n % 2,
            guidance_scale=1.0 + n,
            ar_seed=40 + n,
            text=replace(greedy, top_k=n),
        )
        for n in range(4)
    ]
    sized = [
        replace(job, custom_id=f"sized-{n}", seed=n, size=SQUARE, drop_think=False)
        for n in range(2)
    ]
    alone = replace(job, custom_id="alone", prompt="a green square", text=greedy, ar_seed=3)
    every = [*sampled, *edits, *sized, alone]
    return every[::2] + every[1::2]


def run(
    jobs: Sequence[ImageJob], stages: ImageStages, size: int, *, events: list[Any] | None = None
) -> Ends:
    batch = ContinuousBatch(
        WholeBatches(map(Ticket, jobs), stages, lambda since: PhaseClock(since, lambda: None)),
        Together(size, size),
    )
    ends: Ends = {}
    for event in batch.run():
        if isinstance(event, ImageRequest | Lost):
            ends[event.job.custom_id] = event
        elif events is not None:
            events.append(event)
    return ends


def sharing(family: Any, tree: KVTree[Rows] | None = None, *, draws: bool = True) -> ImageStages:
    return replace(studio_of(family, tree=tree), texts=Texts(), draws=draws)


def told(ends: Ends) -> dict[str, tuple[bytes, Any, Any]]:
    """The latents' bits and the pixels, text and ids, status of reuse."""
    return {
        name: (_bits(end), end.text, end.reuse.status)
        for name, end in ends.items()
        if isinstance(end, ImageRequest)
    }


def _bits(end: ImageRequest) -> bytes:
    latents: bytes = end.denoise_state.latents.numpy().tobytes()
    return latents + end.pixels.tobytes()


_each: dict[str, tuple[bytes, Any, Any]] = {}


@pytest.fixture
def each(family: Any, jobs: list[ImageJob]) -> dict[str, tuple[bytes, Any, Any]]:
    """The oracle: every job in a run of its own, which writes its own text."""
    if not _each:
        for one in jobs:
            _each.update(told(run([one], studio_of(family), 1)))
    return dict(_each)


def decoded(ends: Ends) -> dict[str, int]:
    return {
        name: end.reuse.ar_decode_tokens
        for name, end in ends.items()
        if isinstance(end, ImageRequest) and end.reuse.ar_decode_tokens
    }


def writers(ends: Ends) -> dict[str, str | None]:
    return {n: end.cot_from for n, end in ends.items() if isinstance(end, ImageRequest)}


@pytest.mark.parametrize(("size", "budget"), diagonal((1, 4, 16), (0, 150_000, 10**9)))
def test_each_text_is_written_once_and_nothing_differs_to_the_bit(
    family: Any, jobs: list[ImageJob], each: dict[str, Any], size: int, budget: int
) -> None:
    ends = run(jobs, sharing(family, KVTree(budget)), size)
    assert told(ends) == each
    assert len(decoded(ends)) == 4
    found = writers(ends)
    for kind, count in (("sampled", 3), ("edit", 4), ("sized", 2), ("alone", 1)):
        of_kind = [writer for name, writer in found.items() if name.startswith(kind)]
        (own,) = [name for name in decoded(ends) if name.startswith(kind)]
        assert of_kind.count(own) == count - 1
        assert found[own] is None
    for name, writer in found.items():
        end = ends[name]
        assert isinstance(end, ImageRequest)
        expected = decoded(ends)[writer] if writer else 0
        assert end.reuse.ar_taken_tokens == expected
        if writer and budget == 10**9:
            assert end.reuse.ar_prefill_tokens == 0, "its rows are all there"


def test_texts_spilled_to_main_memory_come_back(
    family: Any, jobs: list[ImageJob], each: dict[str, Any]
) -> None:
    host = Host[Any](
        10**9, spill=lambda rows: rows.to_host(), restore=lambda rows: rows.to_device()
    )
    tree = KVTree(120_000, host=host)
    ends = run(jobs, sharing(family, tree), 4)
    assert told(ends) == each
    assert tree.host_bytes > 0
    assert len(decoded(ends)) == 4


def test_a_tree_that_splits_texts_gives_the_same_ids(
    family: Any, jobs: list[ImageJob], each: dict[str, Any]
) -> None:
    ends = run(jobs, sharing(family, KVTree(10**9, splits_text=True)), 4)
    assert {n: t[1].ids for n, t in told(ends).items()} == {n: t[1].ids for n, t in each.items()}
    assert len(decoded(ends)) == 4


@pytest.mark.parametrize("budget", [0, 10**9])
def test_rows_counted_by_a_hook_are_those_of_the_lines(
    family: Any, jobs: list[ImageJob], budget: int
) -> None:
    rows: list[int] = []
    hook = family.network.model.register_forward_pre_hook(
        lambda _module, arguments: rows.append(arguments[0].shape[0])
    )
    ends = run(jobs, sharing(family, KVTree(budget)), 4)
    hook.remove()
    lines = 0
    for end in ends.values():
        assert isinstance(end, ImageRequest)
        report = end.reuse
        lines += report.ar_prefill_tokens + report.ar_decode_tokens + report.ar_surplus_tokens
        lines += sum(b.computed + end.denoise_steps * b.per_step for b in report.branches)
    assert sum(rows) == lines


@pytest.mark.parametrize("size", [1, 16])
def test_a_source_that_cannot_be_read_takes_no_text_with_it(
    family: Any, jobs: list[ImageJob], each: dict[str, Any], size: int, tmp_path: Path
) -> None:
    lost = [replace(one, images=(str(tmp_path / "gone"),)) for one in jobs[:1]]
    ends = run([*lost, *jobs[1:]], sharing(family, KVTree(10**9)), size)
    assert isinstance(ends[jobs[0].custom_id], Lost)
    del each[jobs[0].custom_id]
    assert told(ends) == each


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("after", [0, 3])
def test_a_writer_that_fails_is_followed_by_the_next(
    family: Any,
    jobs: list[ImageJob],
    each: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    after: int,
) -> None:
    """`after`: tokens that the first writer of the sampled text has when its decode fails."""
    step, failed = stages_of.DecodeRequest.draw, []

    def draw(decoding: Any) -> Any:
        is_first = decoding._script.needs_ratio and decoding._script.bot_task == "think_recaption"
        if is_first and decoding.count > after and failed in ([], [decoding]):
            failed[:] = [decoding]
            raise RuntimeError("no draw")
        return step(decoding)

    monkeypatch.setattr(stages_of.DecodeRequest, "draw", draw)
    ends = run(jobs, sharing(family, KVTree(10**9)), size)
    (lost,) = [name for name, end in ends.items() if isinstance(end, Lost)]
    del each[lost]
    assert told(ends) == each
    same = {n: w for n, w in writers(ends).items() if n.startswith(lost.split("-")[0])}
    assert list(same.values()).count(None) == 1, "the next one wrote it, for all others"


def test_a_drawing_that_fails_takes_no_text_with_it(
    family: Any, jobs: list[ImageJob], each: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(one for one in jobs if one.custom_id.startswith("sampled"))
    original = ImageStages.decode

    def decode(stages: Any, work: Any) -> Any:
        if work.job.custom_id == first.custom_id:
            raise RuntimeError("it cannot be decoded")
        return original(stages, work)

    monkeypatch.setattr(ImageStages, "decode", decode)
    ends = run(jobs, sharing(family, KVTree(10**9)), 4)
    assert isinstance(ends.pop(first.custom_id), Lost)
    del each[first.custom_id]
    assert told(ends) == each
    others = [w for n, w in writers(ends).items() if n.startswith("sampled")]
    assert others == [first.custom_id] * 2


def test_out_of_memory_drops_prefixes_and_no_text(
    family: Any, jobs: list[ImageJob], each: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third branch finds no memory: prefixes go, texts stay, and are fed again."""
    branch, calls = family.network.branch, iter(range(10**6))

    def short(layout: Any, buffer: Any) -> Any:
        if next(calls) % 3 == 2:
            raise torch.OutOfMemoryError("no room")
        return branch(layout, buffer)

    monkeypatch.setattr(family.network, "branch", short)
    ends = run(jobs, sharing(family, KVTree(10**9)), 4)
    assert told(ends) == each


def test_a_source_that_changed_meanwhile_gets_a_text_of_its_own(
    family: Any, job: ImageJob, sources: tuple[str, ...]
) -> None:
    edits = [
        replace(job, custom_id=f"edit-{n}", images=sources[:1], seed=n, bot_task="recaption")
        for n in range(3)
    ]
    stages = sharing(family, KVTree(10**9))
    first = run(edits[:1], stages, 1)
    batch = [*edits[1:]]
    Path(sources[0]).write_bytes(Path(sources[1]).read_bytes())
    ends = run(batch, stages, 1)
    assert writers(first | ends) == {"edit-0": None, "edit-1": None, "edit-2": "edit-1"}


def test_a_job_that_ends_with_its_text_has_the_same(
    family: Any, jobs: list[ImageJob], each: dict[str, Any]
) -> None:
    ends = run(jobs, sharing(family, KVTree(10**9), draws=False), 4)
    texts = {name: end.text for name, end in ends.items() if isinstance(end, ImageRequest)}
    assert texts == {name: text for name, (_, text, _) in each.items()}
    assert len(decoded(ends)) == 4


def test_who_waits_has_not_begun(family: Any, job: ImageJob) -> None:
    """A line's clock and its events begin when the text is there."""
    seeds = [replace(job, custom_id=f"{n}", seed=n) for n in range(3)]
    events: list[Any] = []
    run(seeds, sharing(family, KVTree(10**9)), 4, events=events)
    begun = [n for n, event in enumerate(events) if isinstance(event, JobStarted)]
    thought = [n for n, event in enumerate(events) if is_token(event)]
    assert begun[0] < thought[0]
    assert thought[-1] < begun[1]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.thorough), 8])
def test_a_text_that_was_written_before_is_fed_again_to_the_bit(
    family: Any, jobs: list[ImageJob], each: dict[str, Any], size: int
) -> None:
    """Also where its last tokens were taken back: a section that had no beginning."""
    hot = [
        replace(
            jobs[0],
            custom_id=f"hot-{n}",
            images=(),
            ar_seed=n,
            text=replace(jobs[0].text, temperature=2.5, top_p=1.0, max_new_tokens=40),
        )
        for n in range(8)
    ]
    for one in hot:
        each.update(told(run([one], studio_of(family), 1)))
    ends = run([*jobs, *hot], sharing(family, KVTree(10**9), draws=False), 4)
    given = []
    for one in [*jobs, *hot]:
        end = ends[one.custom_id]
        assert isinstance(end, ImageRequest)
        assert end.text.ids is not None
        assert end.text.text is not None
        facts = {"bot_task": one.bot_task, **end.cached.note}
        written = note(end.text.ids, end.text.text, facts)
        given.append(
            replace(
                one,
                cot_token_ids=end.text.ids,
                written_json=json.dumps(written),
                size=SizeRequest(end.canvas.bucket.size.height, end.canvas.bucket.size.width),
            )
        )
    drawn = run(given, studio_of(family, tree=KVTree(10**9)), size)
    again = told(drawn)
    shared = [end.reuse for name, end in drawn.items() if name.startswith(("sampled", "edit"))]
    # One of each text is fed, the others find all of its rows.
    assert [reuse.ar_prefill_tokens for reuse in shared].count(0) == len(shared) - 2
    for name, (bits, text, status) in each.items():
        assert again[name][0] == bits, name
        assert again[name][1].ids == text.ids
        assert (again[name][1].text, again[name][1].cut) == (text.text, text.cut)
        assert again[name][2] == status
