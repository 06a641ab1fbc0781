"""Out of memory without dividing work anew: what is tried, in which order, to the same bits; and
what one group learns for the next.
"""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.conftest import studio_of
from engine.test_group import _Buffers, _pixels, _run

from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.settings.run import BatchConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobEnded, Outcome
from hyimg_cli.spec.job import ImageJob, SizeRequest

FULL = torch.OutOfMemoryError("tried to allocate 80 GiB")


@pytest.fixture(scope="module")
def jobs(job: ImageJob) -> list[ImageJob]:
    """Alike, with texts that end at different times."""
    return [
        replace(
            job,
            custom_id=f"{n}",
            seed=n,
            size=SizeRequest(64, 64),
            num_inference_steps=2,
            text=replace(job.text, max_new_tokens=2 + n),
            ar_seed=n,
        )
        for n in range(4)
    ]


@pytest.fixture(scope="module")
def expected(family: Any, jobs: list[ImageJob]) -> dict[str, bytes]:
    """Pixels of all jobs together, with room for everything."""
    return _pixels(_run(jobs, studio_of(family), 4))


def limit_slots(
    monkeypatch: pytest.MonkeyPatch, model: Any, jobs: list[ImageJob], part: float
) -> None:
    """No more slots in all than so many times those of the largest job alone."""
    gc.collect()
    model.arena.shrink()
    # Other tests may hold some.
    pages, held, most = model.arena.pages, model.arena.pages.used, 0
    for job in jobs:
        pages.peak = held
        _run([job], studio_of(model), 1)
        most = max(most, pages.peak - held)
    model.arena.shrink()
    room = (held + int(most * part)) * pages.rows
    resize = model.arena.storage.resize

    def limited(slots: int) -> None:
        if slots > room:
            raise FULL
        resize(slots)

    monkeypatch.setattr(model.arena.storage, "resize", limited)


def limited(monkeypatch: pytest.MonkeyPatch, model: Any, most: int) -> list[int]:
    """No more than `most` pictures in a denoise step; sizes of the batches that were refused."""
    refused: list[int] = []
    velocity = model.network.velocity

    def small(pictures: Any) -> Any:
        if len(pictures) > most:
            refused.append(len(pictures))
            raise FULL
        return velocity(pictures)

    monkeypatch.setattr(model.network, "velocity", small)
    return refused


@pytest.mark.parametrize("has_prewarm", [True, False])
def test_a_size_that_was_too_large_once_is_not_tried_again(
    family: Any,
    jobs: list[ImageJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_prewarm: bool,
) -> None:
    """Learnt by prewarming or by jobs, for the run that follows and for later groups."""
    config = RunConfig(OutputConfig(tmp_path), batch=BatchConfig(prewarm=has_prewarm))
    expected = _pixel_digests(ran(config, family, jobs, tmp_path / "plain"))
    refused = limited(monkeypatch, family, 2)
    session = Session(config, lambda *_, **__: family)
    first = ran(config, family, jobs, tmp_path / "first", session=session)
    assert refused == [4], "four together, once"
    later = [replace(one, custom_id=f"later-{one.custom_id}") for one in jobs]
    second = ran(config, family, later, tmp_path / "second", session=session)
    assert refused == [4]
    for lines in (first, second):
        assert list(_pixel_digests(lines).values()) == list(expected.values())
        assert {line.batch["denoise"] for line in lines.values()} == {2}
    told = any("continued in halves" in note for line in first.values() for note in line.warnings)
    assert told is not has_prewarm, "a job tells what happened to it, not to a stand-in"
    session.close()
    ran(config, family, jobs, tmp_path / "anew", session=session)
    assert refused == [4, 4], "a model that is loaded anew may have more room"


def ran(
    config: RunConfig,
    model: Any,
    jobs: list[ImageJob],
    out: Path,
    session: Session | None = None,
) -> dict[str, Outcome]:
    own = session or Session(config, lambda *_, **__: model)
    with RunFolder(out) as folder:
        events = list(own.run(make_plan(jobs, registry.model_card), folder))
    return {e.outcome.custom_id: e.outcome for e in events if isinstance(e, JobEnded)}


def _pixel_digests(lines: dict[str, Outcome]) -> dict[str, str]:
    return {name: line.outputs[0].pixel_sha256 for name, line in sorted(lines.items())}


def test_only_the_size_that_was_short_gets_smaller(
    family: Any, jobs: list[ImageJob], tmp_path: Path
) -> None:
    config = RunConfig(OutputConfig(tmp_path), batch=BatchConfig(prewarm=False))
    session = Session(config, lambda *_, **__: family)
    with pytest.MonkeyPatch.context() as patch:
        limited(patch, family, 2)
        ran(config, family, jobs, tmp_path / "short", session=session)
    for size, most in ((SizeRequest(64, 64), 2), (SizeRequest(), 4)):
        again = [replace(one, size=size) for one in jobs]
        lines = ran(config, family, again, tmp_path / str(size), session=session)
        assert {line.batch["denoise"] for line in lines.values()} == {most}


def test_a_decode_is_tried_again_without_the_shared_prefixes(
    family: Any,
    jobs: list[ImageJob],
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = KVTree[Any](10**9)
    decode = family.decode_latents

    def full(latents: Any) -> Any:
        if tree.held_bytes:
            raise FULL
        return decode(latents)

    monkeypatch.setattr(family, "decode_latents", full)
    ends = _run(jobs, studio_of(family, tree=tree), 4)
    assert _pixels(ends) == expected
    assert "prefixes kept for other jobs" in " ".join(ends["0"].warnings)  # type: ignore[union-attr]


def test_a_decode_waits_for_the_memory_of_others(
    family: Any,
    jobs: list[ImageJob],
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two that are done first are decoded last, when no other job holds any K/V."""
    buffers, decode = _Buffers(monkeypatch, family), family.decode_latents

    def full(latents: Any) -> Any:
        if buffers.alive:
            raise FULL
        return decode(latents)

    monkeypatch.setattr(family, "decode_latents", full)
    ends = _run(jobs, studio_of(family), 3, draw_size=2)
    assert _pixels(ends) == expected
    noted = [name for name, end in ends.items() if "decoded after them" in str(end.warnings)]  # type: ignore[union-attr]
    assert noted == ["0", "1"]


def test_a_decode_that_waited_is_tried_without_what_others_left(
    family: Any, jobs: list[ImageJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One picture needs the memory of other jobs, and of the prefixes that they kept meanwhile."""
    more = [replace(one, custom_id=f"{one.seed + 4}", seed=one.seed + 4) for one in jobs]
    eight = [*jobs, *more]
    expected = _pixels(_run(eight, studio_of(family), 4))
    tree, buffers, decode = KVTree[Any](10**9), _Buffers(monkeypatch, family), family.decode_latents
    first, held = [], []

    def full(latents: Any) -> Any:
        first.append(float(latents.sum()))
        if first[-1] == first[0] and (buffers.alive or tree.held_bytes):
            held.append((bool(buffers.alive), bool(tree.held_bytes)))
            raise FULL
        return decode(latents)

    monkeypatch.setattr(family, "decode_latents", full)
    ends = _run(eight, studio_of(family, tree=tree), 3, draw_size=2)
    assert held == [(True, True), (True, False), (False, True)]
    assert _pixels(ends) == expected


def test_a_picture_that_never_fits_names_the_flag(
    family: Any, jobs: list[ImageJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_latents: Any) -> Any:
        raise FULL

    monkeypatch.setattr(family, "decode_latents", full)
    config = RunConfig(OutputConfig(tmp_path), batch=BatchConfig(prewarm=False))
    lines = ran(config, family, jobs, tmp_path / "out")
    errors = [line.error for line in lines.values()]
    assert [error.code for error in errors if error] == ["job.out-of-memory"] * 4
    assert all("--vae-use-tiling (changes" in error.hint for error in errors if error)


@pytest.mark.parametrize("part", [1.0, 1.6, 2.0])
def test_jobs_that_cannot_begin_wait_and_those_in_the_way_begin_anew(
    family: Any,
    jobs: list[ImageJob],
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    part: float,
) -> None:
    """Room for the K/V of so many jobs in all."""
    limit_slots(monkeypatch, family, jobs, part)
    ends = _run(jobs, studio_of(family, tree=KVTree(10**9)), 4)
    assert not [end for end in ends.values() if isinstance(end, Lost)]
    assert _pixels(ends) == expected
    notes = str([end.warnings for end in ends.values() if isinstance(end, ImageRequest)])
    assert ("started again" in notes) == (part < 1.2), notes
    assert "not enough memory" in notes


def test_texts_that_find_no_page_to_go_on_begin_again(
    family: Any, jobs: list[ImageJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts have room, and the texts of one or two of them."""
    text = replace(jobs[0].text, max_new_tokens=24)
    longer = [replace(one, text=text) for one in jobs]
    expected = _pixels(_run(longer, studio_of(family), 4))
    arena, (opening, *_) = family.arena, [family.opening(one, []) for one in longer]
    arena.shrink()
    resize, page = arena.storage.resize, arena.page
    prompts = 4 * -(-len(opening.ids) // page)
    room = arena.slots + (prompts + 16) * page

    def limited(slots: int) -> None:
        if slots > room:
            raise FULL
        resize(slots)

    monkeypatch.setattr(arena.storage, "resize", limited)
    ends = _run(longer, studio_of(family), 4)
    assert _pixels(ends) == expected
    notes = [end.warnings for end in ends.values() if isinstance(end, ImageRequest)]
    again = "started again: not enough memory to write longer texts together"
    assert any(again in note for note in notes)
    assert not all(again in note for note in notes)
