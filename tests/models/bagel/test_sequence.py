"""Blocks, contexts and sizes by number."""

from dataclasses import replace
from typing import Any

import pytest

from hyimg_cli.kv.segments import ImageSegment, TextSegment
from hyimg_cli.models.bagel.config import SizeLimits, read_architecture
from hyimg_cli.models.bagel.prompter import THINK_PROMPT, BagelPrompter
from hyimg_cli.models.bagel.sequence import (
    BlockLayout,
    Markers,
    SourcePlace,
    contexts,
    fitted,
    segments,
    source_shape,
)
from hyimg_cli.models.common.spans import Grid, QuerySpan
from hyimg_cli.spec.card import Bucket
from hyimg_cli.spec.job import Size

from .conftest import CASES, GOLDEN

MARKERS = Markers(398, 399, 400, 401)
VAE_LIMITS, VIT_LIMITS, PIXELS = SizeLimits(1024, 512, 16), SizeLimits(980, 224, 14), 1_806_336
DEMO_SIZES = ((1024, 1024), (768, 1024), (1024, 768), (576, 1024), (1024, 576))
SQUARE = SourcePlace(Size(1024, 1024), Size(1024, 1024), Size(980, 980), Grid(70, 70))


@pytest.fixture(scope="module")
def prompter() -> BagelPrompter:
    return BagelPrompter(GOLDEN / "checkpoint", "golden")


def test_an_edit_at_the_real_sizes() -> None:
    """An image takes thousands of places in a buffer, and one of rope."""
    found = contexts(MARKERS, [SQUARE, tuple(range(8))])
    vae, vit, text = found.full.blocks
    assert [(b.stop - b.start, b.rope) for b in (vae, vit, text)] == [(4098, 0), (4902, 1), (10, 2)]
    assert (found.full.length, found.full.next_rope) == (9010, 12)
    assert (found.without_text.length, found.without_text.next_rope) == (9000, 2)
    assert (found.without_images.length, found.without_images.next_rope) == (10, 10)
    assert found.full.ids[: found.without_text.length] == found.without_text.ids
    noise = found.full.noise(Grid(64, 64))
    assert set(noise.positions(9010, 9010 + 4098)) == {12}
    # No token stands between the two blocks of an image but their markers.
    assert found.full.ids[4096:4101] == (-1, 401, 400, -2, -2)


@pytest.mark.parametrize("name", sorted(CASES["runs"]))
def test_contexts_of_the_published_code(prompter: BagelPrompter, name: str) -> None:
    run = CASES["runs"][name]
    sizes = {"RGB": Size(118, 75), "RGBA": Size(60, 90)}
    modes = iter(run["modes"])
    parts: list[Any] = [
        source_shape(sizes[next(modes)], prompter.arch)
        if text.startswith("<picture")
        else prompter.vocabulary.encode(text)
        for text in run["inputs"]
    ]
    system = prompter.vocabulary.encode(THINK_PROMPT) if run["think"] else None
    found = contexts(MARKERS, parts, system=system, written=run.get("retokenised_ids"))
    by_name = {"cond": found.full, "text_cfg": found.without_text, "img_cfg": found.without_images}
    if "written" in run or run["think"]:
        ids = tuple(run["retokenised_ids"])
        found = contexts(MARKERS, parts, system=system, written=ids)
        by_name["cond"] = found.full
    assert {name: layout.next_rope for name, layout in by_name.items()} == run["rope"]
    assert {name: layout.length for name, layout in by_name.items()} == run["length"]


def test_texts_and_markers(prompter: BagelPrompter) -> None:
    assert CASES["system_text"] == THINK_PROMPT
    for text, ids in CASES["text_ids"].items():
        assert list(prompter.vocabulary.encode(text)) == ids
    assert prompter.markers == MARKERS


@pytest.mark.parametrize("one", CASES["sizes"], ids=lambda one: "x".join(map(str, one["size_wh"])))
def test_sizes_at_the_real_limits(one: dict[str, Any]) -> None:
    width, height = one["size_wh"]
    first = fitted(Size(height, width), VAE_LIMITS, PIXELS)
    vae, vit = fitted(first, VAE_LIMITS, PIXELS), fitted(first, VIT_LIMITS, PIXELS)
    assert [first.width, first.height] == one["resized_wh"]
    assert [vae.width, vae.height] == one["vae_wh"]
    assert [vit.width, vit.height] == one["vit_wh"]
    # A grid of its own, not 70 x 70 of a picture that was stretched.
    assert (vit.width // 14) * (vit.height // 14) == one["vit_tokens"]


def test_what_the_files_say_wrongly_is_read_off_the_weights(prompter: BagelPrompter) -> None:
    """The configuration says a table of 32 x 32, and a ViT of three layers."""
    arch = read_architecture(GOLDEN / "checkpoint")
    assert (arch.table_side, arch.vision.num_hidden_layers) == (8, 2)
    assert prompter.card.base_size == 128


def test_segments_are_whole_images_and_texts() -> None:
    shape = SourcePlace(Size(32, 48), Size(32, 48), Size(28, 42), Grid(2, 3))
    layout = contexts(MARKERS, [shape, (1, 2), shape, (3,)]).full
    found = segments(layout, layout.ids, ["a", "b"], layout.length - 1)
    assert [type(one) for one in found] == [ImageSegment, TextSegment, ImageSegment, TextSegment]
    assert found[0].key != found[2].key
    assert sum(one.length for one in found) == layout.length - 1
    inside = layout.blocks[3].start + 2
    assert [one.length for one in segments(layout, layout.ids, ["a", "b"], inside)] == [16, 4]
    assert segments(BlockLayout(MARKERS), (), [], -1) == []


def test_a_text_alone_behind_a_shared_prefix_has_the_same_runs() -> None:
    layout = BlockLayout(MARKERS).text((1, 2, 3))
    assert layout.spans(0, 5) == (QuerySpan(0, 4, True), QuerySpan(4, 5, True))
    assert layout.spans(4, 5) == (QuerySpan(4, 5, True),)
    assert layout.spans(0, 4) == (QuerySpan(0, 3, True), QuerySpan(3, 4, True))


def test_a_crop_is_not_resized_again(prompter: BagelPrompter) -> None:
    """Neither for the VAE, nor for the picture that is drawn of it."""
    arch = replace(prompter.arch, vae_limits=VAE_LIMITS, max_pixels=PIXELS)
    buckets = tuple(Bucket(number, Size(*sides)) for number, sides in enumerate(DEMO_SIZES))
    card = replace(prompter.card, base_size=1024, buckets=buckets)
    assert len(card.crop_sizes()) == len(buckets)
    for size in card.crop_sizes():
        assert source_shape(size, arch).vae_size == size == card.kept_size(size)
