"""Lines of t2v: what they may hold, the rules of frames and sizes, and the jobs they become."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.cli.recipe import read_recipe
from hyimg_cli.errors import CheckpointError, HyimgError
from hyimg_cli.manifest.fields import NOT_IN
from hyimg_cli.manifest.manifest import Manifest, read_manifest
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.manifest.resolved import job_to_json, lines_beside
from hyimg_cli.settings.config import Setting, settle
from hyimg_cli.spec.card import ModelCard, TileRule, VideoCard, VideoDefaults
from hyimg_cli.spec.job import ImageJob, Size, VideoJob
from hyimg_cli.spec.options import OF_STEPS, OF_VIDEOS
from hyimg_cli.spec.plan import Group, VideoGroup
from hyimg_cli.spec.work import film_bytes, video_work
from hyimg_cli.tiling.tiles import tile_plan

CARD = VideoCard(
    model="tiny-video",
    family="hunyuan_video15",
    name="a card",
    is_trained=False,
    size_multiple=16,
    pixels_per_cell=16,
    frame_stride=4,
    latent_channels=32,
    max_prompt_tokens=1000,
    tiles=TileRule(16, 12, 16),
    component_bytes=(("transformer", 10), ("vae", 5)),
    defaults=VideoDefaults(
        size=Size(480, 848),
        num_frames=121,
        fps=24,
        num_inference_steps=50,
        guidance_scale=6.0,
        flow_shift=5.0,
    ),
    follows=OF_STEPS | OF_VIDEOS | {"lora", "negative_prompt", "scheduler"},
)


def of_two(scale: float) -> VideoCard:
    """The card of a model of two transformers."""
    defaults = replace(CARD.defaults, guidance_scale_2=scale)
    return replace(CARD, defaults=defaults, follows=CARD.follows | {"guidance_scale_2"})


def read(*entries: dict[str, Any]) -> Manifest:
    lines = ({"task": "t2v", "prompt": "a cat", "custom_id": f"v{n}"} | e for n, e in
             enumerate(entries))  # fmt: skip
    return read_manifest("-", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))


def no_pictures(model: str) -> ModelCard:
    raise AssertionError(f"{model} is asked for")


def resolved(
    *entries: dict[str, Any],
    card: VideoCard = CARD,
    settings: dict[str, Setting] | None = None,
    **flags: Any,
) -> tuple[list[VideoJob], list[HyimgError]]:
    manifest = read(*entries)
    settings = settings or settle(flags, {}, {})
    jobs, faults = resolve_jobs(manifest, settings, no_pictures, lambda model: card)
    videos = [job for job in jobs if isinstance(job, VideoJob)]
    assert len(videos) == len(jobs)
    return videos, [*manifest.faults, *faults]


def only(*entries: dict[str, Any], **more: Any) -> VideoJob:
    (job,), faults = resolved(*entries, **more)
    assert not faults
    return job


def only_fault(**more: Any) -> HyimgError:
    jobs, faults = resolved(more)
    assert (len(jobs), len(faults)) == (0, 1), faults
    return faults[0]


def test_a_prompt_is_enough() -> None:
    job = only({})
    assert (job.size, job.num_frames, job.fps) == (Size(480, 848), 121, 24)
    assert (job.num_inference_steps, job.guidance_scale, job.flow_shift) == (50, 6.0, 5.0)
    assert (job.negative_prompt, job.guidance_scale_2, job.model) == ("", None, "tiny-video")


@pytest.mark.parametrize(
    ("frames", "nearest"),
    [(2, "1 and 5"), (6, "5 and 9"), (120, "117 and 121"), (10000, "9997 and 10001")],
)
def test_frames_that_the_library_would_round_are_refused(frames: int, nearest: str) -> None:
    fault = only_fault(num_frames=frames)
    assert (fault.code, fault.where) == ("manifest.frames", "stdin:1: num_frames")
    assert "4 * k + 1" in fault.what
    assert nearest in fault.hint


@pytest.mark.parametrize("frames", [0, -3, 1000000, 10**30])
def test_frames_out_of_range_are_refused(frames: int) -> None:
    assert only_fault(num_frames=frames).code == "manifest.out-of-range"


def test_a_fraction_is_no_number_of_frames() -> None:
    assert only_fault(num_frames=9.5).code == "manifest.wrong-type"


@pytest.mark.parametrize("frames", [1, 5, 121, 10001])
def test_frames_that_fit(frames: int) -> None:
    assert only({"num_frames": frames}).num_frames == frames


@pytest.mark.parametrize(
    ("size", "side", "nearest"),
    [("64x30", "height 30", "16 and 32"), ("64x17", "height 17", "16 and 32"),
     ("850x480", "width 850", "848 and 864"), ("8191x4096", "width 8191", "8176 and 8192")],
)  # fmt: skip
def test_sizes_that_the_library_would_round_are_refused(size: str, side: str, nearest: str) -> None:
    fault = only_fault(size=size)
    assert (fault.code, fault.where) == ("manifest.size", "stdin:1: size")
    assert side in fault.what
    assert nearest in fault.hint


def test_both_sides_are_named() -> None:
    _, faults = resolved({"width": 100, "height": 30})
    assert len(faults) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("auto", (480, 848)), ("96x64", (64, 96)), ("16:9", (480, 848)), ("9:16", (848, 480)),
     ("1:1", (640, 640)), ("32:18", (480, 848)), ("1:16", (2544, 160))],
)  # fmt: skip
def test_sizes_and_ratios(text: str, expected: tuple[int, int]) -> None:
    assert only({"size": text}).size == Size(*expected)
    assert only({}, size=text).size == Size(*expected)


def test_a_setting_that_does_not_fit_is_said_once() -> None:
    jobs, faults = resolved({}, {}, {"num_frames": 5}, num_frames=6, size="100x64")
    assert not jobs
    assert sorted(fault.where for fault in faults) == ["flag: num_frames", "flag: size"]


def test_what_nobody_reads_is_refused() -> None:
    assert only_fault(guidance_scale=1, negative_prompt="blur").code == "manifest.unconsumed"
    assert only_fault(guidance_scale_2=3.0).code == "manifest.not-followed"
    # As settings of a mixed run they pass.
    assert only({}, guidance_scale_2=3.0).guidance_scale_2 is None
    job = only({"guidance_scale": 1}, negative_prompt="blur")
    assert (job.branch_count, "negative_prompt" in job_to_json(job)) == (1, False)


def test_a_second_transformer_has_its_own_scale() -> None:
    two = of_two(3.0)
    assert only({}, card=two).guidance_scale_2 == 3.0
    assert only({"guidance_scale_2": 2}, card=two).guidance_scale_2 == 2.0
    _, (unused,) = resolved({"guidance_scale_2": 2, "guidance_scale": 1}, card=two)
    assert unused.code == "manifest.unconsumed"
    assert "both transformers" in unused.what


def test_a_scale_below_1_is_refused_where_it_would_be_none() -> None:
    assert only({"guidance_scale": 0.5}).branch_count == 2
    above = replace(CARD, guides_below_one=False)
    assert only({"guidance_scale": 1}, card=above).branch_count == 1
    _, (in_line,) = resolved({"guidance_scale": 0.5}, card=above)
    _, (in_flag,) = resolved({}, {"seed": 2}, card=above, guidance_scale=0.0)
    assert in_line.code == in_flag.code == "manifest.guidance"
    assert in_flag.where == "flag: guidance_scale"


FOUR = {
    "negative_prompt": ("a", "b", "c", "d"),
    "num_frames": ("5", "9", "13", "17"),
    "fps": ("11", "12", "13", "14"),
    "guidance_scale_2": ("1.5", "2.5", "3.5", "4.5"),
}


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("first", range(5))
def test_line_flag_environment_recipe_checkpoint(name: str, first: int, tmp_path: Path) -> None:
    """With the levels from `first` on set, the first of them wins."""
    without = set(NOT_IN["t2i"]) - {"fit", "lora", "scheduler", "camera", "choices"}
    assert FOUR.keys() == without | {"negative_prompt"}
    line, flag, variable, recipe = FOUR[name]
    file = tmp_path / "r.toml"
    text = f"'{recipe}'" if name == "negative_prompt" else recipe
    file.write_text(f"[sampling]\n{name} = {text}\n")
    settings = settle(
        {name: flag} if first <= 1 else {},
        {f"HYIMG_{name.upper()}": variable} if first <= 2 else {},
        read_recipe(file) if first <= 3 else {},
    )
    card = of_two(9.0)
    entry = {name: line if name == "negative_prompt" else json.loads(line)} if first == 0 else {}
    found = getattr(only(entry, card=card, settings=settings), name)
    own = {"negative_prompt": "", "num_frames": 121, "fps": 24, "guidance_scale_2": 9.0}
    assert found == (own[name] if first == 4 else type(own[name])(FOUR[name][first]))


def test_children_have_seeds_of_their_own() -> None:
    jobs, _ = resolved({"n": 2, "seed": 5}, {"seeds": [8, 9]}, {})
    assert [(job.custom_id, job.seed) for job in jobs[:4]] == [
        ("v0-0", 5), ("v0-1", 6), ("v1-0", 8), ("v1-1", 9),
    ]  # fmt: skip
    assert jobs[4].seed == resolved({}, {}, {})[0][2].seed


def test_a_resolved_line_gives_the_same_job(tmp_path: Path) -> None:
    entry = {"size": "9:16", "num_frames": 9, "negative_prompt": "", "x_sku": 1, "metadata": [1]}
    job = only(entry)
    (line,) = lines_beside([job], tmp_path)
    again = only(line)
    assert job_to_json(again) == job_to_json(job) == line
    assert (again.size, again.seed, again.extra_json) == (job.size, job.seed, job.extra_json)


def test_each_kind_has_its_model(card_of: Callable[[str], ModelCard]) -> None:
    manifest = read_manifest(
        "-", io.StringIO('{"prompt": "a cat"}\n{"prompt": "a dog", "task": "t2v"}\n')
    )
    settings = settle({"model": "pictures", "video_model": "films"}, {}, {})
    asked: list[str] = []

    def video_card(model: str) -> VideoCard:
        asked.append(model)
        return CARD

    (picture, film), faults = resolve_jobs(manifest, settings, card_of, video_card)
    assert (faults, asked) == ([], ["films"])
    assert isinstance(picture, ImageJob)
    assert (picture.model, film.model) == ("pictures", "films")


def test_a_line_whose_model_is_no_video_model_is_a_fault() -> None:
    def no_card(model: str) -> VideoCard:
        raise CheckpointError("model_index.json is missing", where=model)

    manifest = read({"model": "tiny-image"})
    _, (fault,) = resolve_jobs(manifest, settle({}, {}, {}), no_pictures, no_card)
    assert (fault.code, fault.where) == ("manifest.model", "stdin:1: model")


def test_groups_by_model_size_and_frames(card_of: Callable[[str], ModelCard]) -> None:
    text = "".join(
        json.dumps(entry) + "\n"
        for entry in (
            {"task": "t2v", "prompt": "a", "num_frames": 5},
            {"prompt": "a picture"},
            {"task": "t2v", "prompt": "b", "num_frames": 5},
            {"task": "t2v", "prompt": "a", "num_frames": 9},
            {"task": "t2v", "prompt": "a", "num_frames": 5, "size": "64x64"},
            {"task": "t2v", "prompt": "a", "num_frames": 5, "seed": 9},
        )
    )
    manifest = read_manifest("-", io.StringIO(text))
    jobs, _ = resolve_jobs(manifest, settle({}, {}, {}), card_of, lambda model: CARD)
    plan = make_plan(jobs, card_of)
    assert sorted(job.custom_id for job in plan.jobs) == sorted(job.custom_id for job in jobs)
    names = [[job.custom_id[-1] for job in group.jobs] for group in plan.groups]
    assert names == [["1", "6", "3"], ["4"], ["5"], ["2"]]
    assert [type(group) for group in plan.groups] == [VideoGroup, VideoGroup, VideoGroup, Group]
    assert plan.groups[0].size_class == "848x480, 5 frames"


@pytest.mark.parametrize(
    ("grid", "tiles"),
    [((16, 16), ([16], [16])), ((30, 53), ([16, 16, 6], [16, 16, 16, 16, 5])),
     ((45, 80), ([16, 16, 16, 9], [16, 16, 16, 16, 16, 16, 8])), ((4, 17), ([4], [16, 5])),
     ((24, 12), ([16, 12], [12]))],
)  # fmt: skip
def test_tiles_start_a_stride_apart(
    grid: tuple[int, int], tiles: tuple[list[int], list[int]]
) -> None:
    plan = tile_plan(CARD.tiles, *grid)
    rows, columns = tiles
    assert [tile.shape for tile in plan.tiles] == [(row, one) for row in rows for one in columns]


def test_what_videos_take() -> None:
    jobs, _ = resolved({}, {"seed": 2}, {"prompt": "other", "guidance_scale": 1, "steps": 10})
    works = [video_work(job, CARD) for job in jobs]
    assert {work.grid for work in works} == {(31, 30, 53)}
    assert [(work.steps, work.forwards) for work in works] == [(50, 100), (50, 100), (10, 10)]
    assert [job.texts for job in jobs] == [("a cat", ""), ("a cat", ""), ("other",)]
    assert {work.latents_bytes for work in works} == {32 * 31 * 30 * 53 * 4}
    pixels = sum(work.pixels for work in works)
    assert pixels == 3 * 121 * 480 * 848
    assert film_bytes(pixels, with_frames=True) > 5 * film_bytes(pixels, with_frames=False) > 0
