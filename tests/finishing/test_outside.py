"""Redraws of edited photographs, put back on their sources: the truth of each is known."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage
from simulated_edits import GLOBAL, Case, case, fitted, photograph

from hyimg_cli.finishing.colour import drift_of
from hyimg_cli.finishing.composite import Bytes, layers
from hyimg_cli.finishing.outside import Edit, Result, edit_of, put_back
from hyimg_cli.finishing.placement import Placement, mapped_back, shown
from hyimg_cli.finishing.planes import blurred, planes
from hyimg_cli.finishing.region import region, views
from hyimg_cli.finishing.registration import Motion
from hyimg_cli.finishing.verdict import Measures, structure_of
from hyimg_cli.journal.edit_facts import edit_warnings
from hyimg_cli.media.images import fit_cover, stretch
from hyimg_cli.spec.job import Size

AREA = 0.1e6


@cache
def made(kind: str, photo: str = "coffee.png", seed: int = 5) -> Case:
    source = fitted(photograph(photo), (400, 600))
    return case(kind, kind, source, np.random.default_rng(seed), AREA)


@cache
def told(kind: str) -> tuple[Edit, Result]:
    return compared(made(kind))


def compared(one: Case, given: Bytes | None = None, **how: Any) -> tuple[Edit, Result]:
    place = Placement.stretched(one.source.shape[:2], one.drawn.shape[:2])
    edit = edit_of(one.drawn, one.reference, place, given=given, **how)
    return edit, put_back(one.source, one.drawn, one.reference, edit, given)


def overlap(edit: Edit, truth: np.ndarray) -> float:
    found = np.asarray(Image.fromarray(edit.mask).resize(truth.shape[::-1]))
    return float((found & truth).sum() / (found | truth).sum())


@pytest.mark.parametrize(
    ("kind", "least", "kept"),
    [("recolour", 0.7, 0.95), ("paste", 0.7, 0.9), ("fill", 0.6, 0.95), ("text", 0.3, 0.95)],
)
def test_an_edit_is_found_and_nothing_else_differs(kind: str, least: float, kept: float) -> None:
    one = made(kind)
    edit, result = told(kind)
    assert edit.kind == "local", edit.reasons
    assert overlap(edit, one.mask) > least
    outside = result.matte == 0
    assert np.array_equal(result.pixels[outside], one.source[outside])
    assert outside.mean() > 0.6
    change = np.abs(one.truth.astype(int) - one.source).sum(axis=2)
    assert change[result.matte > 127].sum() > kept * change.sum()
    error = [
        np.square(picture.astype(float) - one.truth)[one.mask].mean()
        for picture in (result.pixels, one.source)
    ]
    assert error[0] < 0.5 * error[1], "inside is what was drawn"


def test_a_text_is_found_whole_with_the_rim_over_which_it_was_blurred() -> None:
    one = case("text", "text", made("none").source, np.random.default_rng(5), 0.27e6)
    edit, _ = compared(one)
    assert edit.kind == "local"
    assert overlap(edit, one.mask) > 0.37
    found = np.asarray(Image.fromarray(edit.mask).resize(one.mask.shape[::-1]))
    # Of the A, which is white, only what is not on white.
    assert found[one.mask].mean() > 0.8


def test_lines_that_moved_and_are_sharper_are_no_edit() -> None:
    y, x = np.mgrid[:200, :200]
    line = 200 - 160.0 * (np.abs(y - 100) < 2)
    moved = np.where(x < 100, line, np.roll(line, 2, axis=0))
    still, drawn = (blurred(np.stack([one] * 3).astype(np.float32), 0.8) for one in (line, moved))
    drawn += 0.5 * (drawn - blurred(drawn, 1.5))
    everywhere = np.ones((200, 200), bool)
    assert not region(drawn, still, views(still), everywhere).mask.any()
    drawn[0, 95:105, 120:180] += 60
    assert region(drawn, still, views(still), everywhere).mask[100, 150]


def lit(gain: float) -> Case:
    """A soft round light of a sharp texture, redrawn with noise."""
    rng = np.random.default_rng(3)
    y, x = np.mgrid[:320, :320]
    light = 1 + gain * np.exp(-((np.hypot(y - 150, x - 170) / 60) ** 2))[..., None]
    source = blurred(rng.uniform(40, 170, (3, 320, 320)), 0.7).transpose(1, 2, 0)
    drawn = blurred((source * light).transpose(2, 0, 1), 0.6).transpose(1, 2, 0)
    drawn += rng.normal(0, 1.5, drawn.shape)
    source, truth, drawn = (
        np.round(one).clip(0, 255).astype(np.uint8) for one in (source, source * light, drawn)
    )
    reference = blurred(planes(source), 0.6).round().astype(np.uint8).transpose(1, 2, 0)
    return Case("lit", "relight", source, drawn, reference, truth, light[..., 0] > 1 + gain / 8)


def test_a_light_is_followed_to_its_soft_ends_and_lights_the_sources_own_pixels() -> None:
    one = lit(0.35)
    edit, result = compared(one)
    assert edit.kind == "local"
    assert overlap(edit, one.mask) > 0.7
    change = np.abs(one.truth.astype(int) - one.source).sum(axis=2)
    assert change[result.matte > 127].sum() > 0.85 * change.sum()
    inside = result.matte == 255
    error = [
        np.abs(picture.astype(float) - one.truth)[inside].mean()
        for picture in (result.pixels, one.drawn)
    ]
    assert error[0] < 1.5, "the source's own texture, and not its redraw"
    assert error[1] > 3.0
    assert np.array_equal(result.pixels[result.matte == 0], one.source[result.matte == 0])


def test_what_no_gain_explains_is_not_lit() -> None:
    """A thing pasted into the light is as it was drawn."""
    one = lit(0.35)
    thing = np.random.default_rng(4).integers(0, 256, (60, 60, 3)).astype(np.float32)
    one.drawn[120:180, 140:200] = blurred(thing.transpose(2, 0, 1), 1.0).transpose(1, 2, 0)
    edit, result = compared(one)
    assert edit.kind == "local"
    inside = slice(126, 174), slice(146, 194)
    error = np.abs(result.pixels[inside].astype(float) - one.drawn[inside])
    assert np.median(error) < 4


def test_drift_of_tone_and_saturation_is_undone_and_not_made_up_for_other_colours() -> None:
    source = planes(made("none").source)
    grey = source.mean(0)
    drawn = 255 * np.clip((grey + 0.9 * (source - grey)) / 255, 0, 1) ** 1.08
    drift = drift_of(source, drawn, None, 0.5)
    error = [np.abs(one - source).mean() for one in (drawn, drift.undone(drawn))]
    assert error[0] > 4
    assert error[1] < 1
    # Of a picture that is red all over, what becomes of black is not known.
    red = np.full((3, 64, 64), 80, np.float32)
    red[0] = np.linspace(214, 226, 64)
    stronger = red.copy()
    stronger[0] += red[0] - 220
    drift = drift_of(red, stronger, None, 0.3)
    assert np.abs(drift.undone(np.zeros((3, 8, 8), np.float32))).max() < 12


@pytest.mark.parametrize("kind", GLOBAL)
def test_an_edit_of_the_whole_is_left_whole(kind: str) -> None:
    edit, result = told(kind)
    assert edit.kind == "global"
    assert edit.reasons
    assert result.matte.min() == 255
    assert result.pixels.shape == made(kind).source.shape


@pytest.mark.parametrize(("alike", "is_whole"), [(0.8, False), (0.65, True)])
def test_structure_of_which_most_is_another_is_an_edit_of_the_whole(
    alike: float, is_whole: bool
) -> None:
    """A framing anew by some percent, or a style of the same colours: 0.65 leaves over half of the
    power unexplained, and nothing that is blended into it fits.
    """
    rng = np.random.default_rng(4)
    own, other = (blurred(rng.normal(size=(256, 256)).astype(np.float32), 1.5) for _ in range(2))
    drawn = alike * own + np.sqrt(1 - alike**2) * other
    levels = [np.stack([128 + 300 * plane] * 3) for plane in (own, drawn)]
    found = structure_of(*levels, np.zeros((256, 256), bool))
    assert found == pytest.approx(alike, abs=0.03)
    measures = Measures(0, 0.7, 0, 0, 0, structure=found, chroma=None, moved=False)
    assert bool(measures.reasons) == is_whole


def test_a_new_background_leaves_the_rest() -> None:
    one, (edit, result) = made("background"), told("background")
    assert (edit.kind, edit.reasons) == ("background", ())
    assert overlap(edit, one.mask) > 0.9
    outside = result.matte == 0
    assert np.array_equal(result.pixels[outside], one.source[outside])


def test_a_redraw_without_an_edit_gives_the_source() -> None:
    one = made("none")
    edit, result = told("none")
    assert (edit.kind, edit.reasons) == ("none", ())
    assert np.array_equal(result.pixels, one.source)
    assert not result.matte.any()


def test_a_region_limits_what_is_found_or_stands_for_it() -> None:
    one = made("recolour")
    _, columns = np.nonzero(one.mask)
    half = np.zeros(one.source.shape[:2], np.uint8)
    half[:, : int(np.median(columns))] = 255
    edit, result = compared(one, half)
    assert edit.spill is not None
    assert 0.3 < edit.spill < 0.7
    assert np.array_equal(result.pixels[half == 0], one.source[half == 0])
    assert (result.pixels[half > 0] != one.source[half > 0]).any()
    # A whole-picture edit in a region that was given is one of that region.
    night, where = made("night"), np.zeros(one.source.shape[:2], np.uint8)
    where[100:300, 200:400] = 255
    edit, result = compared(night, where, mode="instead")
    assert edit.kind == "local"
    assert np.array_equal(result.pixels[where == 0], night.source[where == 0])
    inside = result.pixels[150:250, 250:350].astype(float), night.source[150:250, 250:350]
    assert np.abs(inside[0] - inside[1]).mean() > 10


@pytest.mark.parametrize("mode", ["limit", "instead"])
def test_an_edit_of_the_whole_in_a_region_stays_in_it(mode: str) -> None:
    """Where the region's mask is grey, as much of it as its level."""
    night = made("night")
    given = np.zeros(night.source.shape[:2], np.uint8)
    given[100:300, 200:300], given[100:300, 300:400] = 255, 100
    edit, result = compared(night, given, mode=mode)
    inside = given > 0
    assert (result.matte <= given).all()
    assert edit.kind == "local"
    assert edit.mask.mean() == pytest.approx(inside.mean(), abs=0.01)
    assert edit.spill == pytest.approx(1 - inside.mean(), abs=0.01)
    assert bool(edit.reasons) == (mode == "limit"), "what else was edited is told"
    assert np.array_equal(result.pixels[~inside], night.source[~inside])
    assert not result.matte[~inside].any()
    changed = np.abs(result.pixels.astype(int) - night.source).max(axis=2)
    assert (changed[inside] > 5).mean() > 0.9
    # A limit that leaves nothing out is none.
    edit, result = compared(night, np.full_like(given, 255))
    assert (edit.kind, edit.mask.mean(), edit.spill) == ("global", 1.0, 0.0)
    assert result.matte.min() == 255


def test_a_moved_redraw_is_moved_back() -> None:
    source = fitted(photograph("astronaut.png"), (384, 384))
    moved = np.asarray(
        Image.fromarray(source).transform(
            (384, 384),
            Image.Transform.AFFINE,
            (1.006, 0, -3.0, 0, 1.006, 1.0),
            Image.Resampling.BICUBIC,
        )
    )
    place = Placement.stretched((384, 384), (384, 384))
    edit = edit_of(moved, source, place)
    # What is drawn at x shows what was shown at 1.006 x - 3.
    assert edit.kind == "none"
    assert edit.motion.zoom == pytest.approx((1 / 1.006,) * 2, abs=2e-4)
    assert edit.motion.shift == pytest.approx((-1 / 1.006, 3 / 1.006), abs=0.1)


def test_detail_lies_where_it_was_whatever_shifted_in_a_size_of_another_shape() -> None:
    source, size = photograph("grass.png")[:400], (304, 432)
    truth, given = source.copy(), np.zeros((400, 512), np.uint8)
    truth[60:340, 20:300, 2] //= 2
    given[60:340, 20:300] = 255
    drawn = np.roll(fitted(truth, size), 1, axis=1)
    place = Placement.stretched(source.shape[:2], size)
    edit = edit_of(drawn, fitted(source, size), place, given=given, mode="instead")
    result = put_back(source, drawn, fitted(source, size), edit, given)
    inside = slice(80, 320), slice(40, 280)
    off = np.abs(result.pixels[inside].astype(int) - truth[inside]).mean()
    assert off < 2


def test_a_redraw_that_moved_too_far_tells_how_far() -> None:
    source = fitted(photograph("astronaut.png"), (256, 256))
    closer = np.asarray(Image.fromarray(source).resize((256, 256), box=(8, 8, 248, 248)))
    edit = edit_of(closer, source, Placement.stretched((256, 256), (256, 256)))
    assert edit.kind == "global"
    assert edit.reasons[-1].startswith("moved"), edit.reasons
    assert edit.motion == Motion()
    moved = edit.to_json()["moved"]
    assert moved["zoom"] == pytest.approx(256 / 240 - 1, abs=0.01)


def test_a_picture_that_is_all_edit_moves_nothing() -> None:
    """What is left without the edit says too little of a shift."""

    def dot(radius: float, colour: tuple[int, int, int]) -> np.ndarray:
        y, x = np.mgrid[:256, :256] + 0.5
        inside = np.clip(radius - np.hypot(y - 128, x - 128) + 0.5, 0, 1)[..., None]
        return np.round(248 * (1 - inside) + np.array(colour) * inside).astype(np.uint8)

    place = Placement.stretched((256, 256), (256, 256))
    edit = edit_of(dot(68, (40, 60, 210)), dot(60, (210, 40, 40)), place)
    assert edit.kind == "local"
    assert edit.motion.zoom == (1.0, 1.0)


@pytest.mark.parametrize("size", [(401, 613), (97, 300), (1000, 333)])
@pytest.mark.parametrize("drawn", [(256, 256), (208, 320)])
@pytest.mark.parametrize("fit", ["stretched", "covered"])
def test_the_way_back_is_exact(size: tuple[int, int], drawn: tuple[int, int], fit: str) -> None:
    """A ramp is at its place again, to a thousandth of the ramp's own levels a pixel."""
    y, x = np.mgrid[: size[0], : size[1]]
    ramp = np.stack([y * 250 / size[0], x * 250 / size[1], y * 0], -1).round().astype(np.uint8)
    place = getattr(Placement, fit)(size, drawn)
    fitter = stretch if fit == "stretched" else fit_cover
    model = fitter(ramp, Size(*drawn))
    rows, columns = place.y.window, place.x.window
    back = mapped_back(model, place, rows, columns).astype(float)
    error = (back - ramp[rows[0] : rows[1], columns[0] : columns[1]])[8:-8, 8:-8, :2]
    assert np.abs(error.mean(axis=(0, 1))).max() < 0.25
    assert np.array_equal(
        shown(ramp, Placement.stretched(size, drawn)), stretch(ramp, Size(*drawn))
    )


def test_the_matte_ends_where_the_redraw_is_the_source_and_follows_what_is_not() -> None:
    """A square in a mask that misses some of it, on the right."""
    rng = np.random.default_rng(0)
    reference, drawn = (rng.normal(128, 2, (3, 512, 512)).astype(np.float32) for _ in range(2))
    drawn[:, 200:300, 200:308] = 60
    mask = np.zeros((512, 512), bool)
    mask[200:300, 200:300] = True
    matte = layers(reference, drawn, mask, mask, np.zeros((4, 256, 256), np.float32)).matte
    assert matte[mask].min() == 1
    left, right = matte[210:290, 193].mean(), matte[210:290, 302].mean()
    assert left < 0.02, "noise of the redraw stays out"
    assert right > 0.5, "what was overseen comes along"
    assert not matte[:, :180].any()
    assert not matte[:, 320:].any()


def test_strips_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("recolour")
    _, whole = told("recolour")
    monkeypatch.setattr("hyimg_cli.finishing.composite._STRIP", 37)
    _, cut = compared(one)
    for one_strip, several in ((whole.pixels, cut.pixels), (whole.matte, cut.matte)):
        off = np.abs(one_strip.astype(int) - several)
        assert off.max() <= 1
        assert np.count_nonzero(off) <= 1e-4 * off.size, "of the rounding of positions"


def redrawn_at_half(source: np.ndarray, truth: np.ndarray) -> Case:
    """Both at half of their size: softened, and the redraw with noise."""
    size = source.shape[0] // 2, source.shape[1] // 2
    reference, drawn = (blurred(planes(fitted(one, size)), 0.5) for one in (source, truth))
    drawn += np.random.default_rng(1).normal(0, 1.0, drawn.shape)
    shown_as, drawn_as = (
        np.round(one).clip(0, 255).astype(np.uint8).transpose(1, 2, 0) for one in (reference, drawn)
    )
    mask = (source != truth).any(axis=2)
    return Case("half", "local", source, drawn_as, shown_as, truth, mask)


def lettered() -> np.ndarray:
    """A red sign in a flat picture, with letters whose strokes are drawn by two pixels."""
    image = Image.new("RGB", (768, 768), (150, 150, 150))
    pen = ImageDraw.Draw(image)
    pen.rectangle((180, 240, 600, 495), fill=(190, 60, 50))
    for top in range(262, 480, 45):
        text = "pull to open the door"
        pen.text((195, top), text, fill=(200, 200, 200), font=ImageFont.load_default(36))
    return np.asarray(image)


@pytest.mark.parametrize("coat", [(190, 60, 50), (150, 60, 55), (60, 90, 140)])
def test_letters_that_were_removed_do_not_shine_through_the_new_coat(
    coat: tuple[int, int, int],
) -> None:
    source = lettered()
    truth = source.copy()
    truth[240:496, 180:601] = coat
    edit, result = compared(redrawn_at_half(source, truth))
    assert edit.kind == "local"
    inside = slice(255, 480), slice(195, 585)
    off = np.abs(result.pixels[inside].astype(int) - truth[inside]).max(axis=2)
    assert (off > 15).mean() < 0.015
    assert np.array_equal(result.pixels[result.matte == 0], source[result.matte == 0])


def test_a_pixelated_face_shows_no_features() -> None:
    source = fitted(photograph("astronaut.png"), (512, 512))
    truth, face = source.copy(), (slice(50, 210), slice(160, 300))
    blocks = Image.fromarray(source[face]).resize((7, 8), Image.Resampling.BOX)
    truth[face] = np.asarray(blocks.resize((140, 160), Image.Resampling.NEAREST))
    edit, result = compared(redrawn_at_half(source, truth))
    assert edit.kind == "local"
    inner = slice(66, 194), slice(176, 284)
    fine, left = (
        blurred(planes(one), 0.7)[:, *inner] - blurred(planes(truth), 0.7)[:, *inner]
        for one in (source, result.pixels)
    )
    shine = float((fine * left).sum() / np.square(fine).sum())
    assert abs(shine) < 0.1


def test_fine_structure_between_two_edits_stays_the_sources() -> None:
    """Texture that is finer than what was drawn, in a gap that closing the mask closes over."""
    rng = np.random.default_rng(2)
    source = rng.integers(90, 160, (512, 512, 3)).astype(np.uint8)
    truth = source.copy()
    for left in (150, 262):
        truth[180:330, left : left + 100] = (40, 60, 190)
    edit, result = compared(redrawn_at_half(source, truth))
    assert edit.kind == "local"
    gap = slice(190, 320), slice(253, 259)
    error = np.abs(result.pixels[gap].astype(int) - source[gap]).mean()
    assert error < 4, "all of the redraw's is some 15"


def test_a_thing_that_was_recoloured_has_no_rim_of_its_old_colour() -> None:
    """Drawn in 64 pixels, where an edge is as wide as the range in which nothing differs."""
    side = np.clip(30.5 - np.abs(np.arange(128) + 0.5 - 64), 0, 1)
    alpha = (side[:, None] * side)[..., None]
    source, truth = (
        np.round(np.array((40, 90, 210)) * (1 - alpha) + np.array(colour) * alpha).astype(np.uint8)
        for colour in ((255, 215, 50), (40, 160, 80))
    )
    edit, result = compared(redrawn_at_half(source, truth))
    assert edit.kind == "local"
    yellow = result.pixels[..., :2].min(axis=2).astype(int) - result.pixels[..., 2]
    assert yellow.max() < 30


def test_a_redraw_whose_rest_is_unlike_the_source_is_not_sure() -> None:
    """Half of an oil style: too little to be an edit of the whole, too much for a redraw."""
    one = made("none")
    reference = planes(one.reference)
    for part, is_sure in ((0.0, True), (0.8, False)):
        soft = ndimage.median_filter(reference, (1, 11, 11))
        levels = reference + part * (soft - reference)
        drawn = np.round(levels).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
        edit = edit_of(drawn, one.reference, Placement.stretched(*[drawn.shape[:2]] * 2))
        assert edit.kind != "global"
        line = edit.to_json() | {"gates": []}
        said = [
            text for text in edit_warnings(line) if text.startswith("not sure: the redraw differs")
        ]
        assert bool(said) is not is_sure


def test_a_lone_thing_that_was_zoomed_is_told_of() -> None:
    y, x = np.mgrid[:256, :256] + 0.5

    def dot(radius: float) -> np.ndarray:
        alpha = np.clip(radius - np.hypot(y - 128, x - 128) + 0.5, 0, 1)[..., None]
        return np.round(250 * (1 - alpha) + np.array((40, 90, 160)) * alpha).astype(np.uint8)

    place = Placement.stretched((256, 256), (256, 256))
    for zoom, is_sure in ((1.01, True), (1.03, False)):
        line = edit_of(dot(50 * zoom), dot(50), place).to_json() | {"gates": []}
        assert line["moved"]["sure"] is is_sure
        assert any("shifted or zoomed" in text for text in edit_warnings(line)) is not is_sure
