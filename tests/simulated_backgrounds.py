"""Photographs whose background was replaced, and photographs that were restyled as a whole, redrawn
as a model would: for `background.py` of the benchmarks and for the tests. The subject is known.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage
from simulated_edits import PHOTOGRAPHS, Levels, Pixels, fitted, moved, photograph

OUTLINES = ("ellipse", "polygon", "noise", "two")
BACKDROPS = ("white", "gradient", "photograph")
TRAITS = ("cutout", "hair", "glass", "shadow", "flat")
RESTYLES = ("sepia", "night", "gain", "paint", "edges", "hue", "other", "faded", "tinted")
# Subjects with detail; ihc and retina have little besides.
_SUBJECTS = tuple(
    name for name in PHOTOGRAPHS if name not in ("hubble_deep_field.jpg", "retina.jpg")
)
# Lengths of strands and shadows are for pictures of this side.
_SIDE = 616


@dataclass(frozen=True)
class Replaced:
    """A source, its redraw and what it is compared with, at the drawn size.

    `subject` [Y, X] at the source's size: 1 where the source stays, falling to 0 at its border;
    zero everywhere for a restyle. `truth`: the edited source.
    """

    name: str
    source: Pixels
    drawn: Pixels
    reference: Pixels
    subject: Levels
    truth: Pixels


def background(
    rng: np.random.Generator,
    outline: str,
    backdrop: str,
    share: float,
    side: int = 704,
    drawn: int = 512,
    soft: float | None = None,
    glow: float = 0.0,
    fringe: float = 0.0,
    trait: str = "",
) -> Replaced:
    """Return a photograph of this side whose subject is `share` of it, before a new backdrop.

    Around it, the redraw may have a `glow` of so many levels, or this part of the old background.
    `trait`: one of TRAITS, such as hair.
    """
    name = str(rng.choice(_SUBJECTS))
    source = _cut(photograph(name), side, rng)
    blur = float(rng.uniform(1, 6) if soft is None else soft)
    subject = subject_of((side, side), outline, share, blur, rng)
    other = BACKDROP[backdrop](source, rng)
    truth = source * subject[..., None] + other * (1 - subject[..., None])
    if glow or fringe:
        away = ndimage.distance_transform_edt(subject < 0.5) * 1024 / side
        rim = (np.exp(-np.square(away / 6)) * (1 - subject))[..., None]
        truth = truth + rim * (glow + fringe * (source - truth))
    if trait:
        source, truth = TRAIT[trait](source.astype(float), subject, other, rng)
        source = _bytes(source)
    name = f"{outline}-{backdrop}-{share:.2f}-{name}"
    return _redrawn(name, source, _bytes(truth), subject, drawn, rng)


def _cutout(
    source: Levels, subject: Levels, other: Levels, rng: np.random.Generator
) -> tuple[Levels, Levels]:
    """The subject has an outline in its source, too: there, it is before another photograph."""
    old, alpha = _other(_bytes(source), rng), subject[..., None]
    return source * alpha + old * (1 - alpha), source * alpha + other * (1 - alpha)


def _hair(
    source: Levels, subject: Levels, other: Levels, rng: np.random.Generator
) -> tuple[Levels, Levels]:
    """Strands of 1 to 3 pixels around at least a third of the outline."""
    strands = Image.new("L", subject.shape[::-1])
    pen, edge = ImageDraw.Draw(strands), subject > 0.5
    y, x = np.nonzero(edge & ~ndimage.binary_erosion(edge, border_value=1))
    down, right = np.gradient(-ndimage.gaussian_filter(subject, 6))
    turn, width = rng.uniform(-np.pi, np.pi), rng.uniform(np.pi / 3, np.pi)
    for at in rng.choice(len(y), len(y) // 4, replace=False):
        outwards = np.arctan2(down[y[at], x[at]], right[y[at], x[at]])
        if np.cos(outwards - turn) < np.cos(width):
            continue
        reach, way = rng.uniform(12, 40) * len(subject) / _SIDE, outwards + rng.uniform(-0.5, 0.5)
        end = x[at] + reach * np.cos(way), y[at] + reach * np.sin(way)
        pen.line([(x[at], y[at]), end], fill=255, width=int(rng.integers(1, 4)))
    hair = ndimage.gaussian_filter(np.asarray(strands) / 255, 0.5)[..., None]
    colour = 30.0 if source[~edge].mean() > 110 else 190.0
    alpha = subject[..., None]
    before, after = source, source * alpha + other * (1 - alpha)
    return before + hair * (colour - before), after + hair * (colour - after)


def _glass(
    source: Levels, subject: Levels, other: Levels, rng: np.random.Generator
) -> tuple[Levels, Levels]:
    """A fifth of the subject has an opacity of 0.4."""
    y, x = np.nonzero(subject > 0.5)
    at = int(rng.integers(len(y)))
    away = np.hypot(*(np.mgrid[: len(subject), : len(subject[0])] - [[[y[at]]], [[x[at]]]]))
    away[subject <= 0.5] = np.inf
    clear = away < np.quantile(away[subject > 0.5], 0.2)
    alpha = (1 - 0.6 * ndimage.gaussian_filter(clear.astype(float), 1))[..., None]
    old = _other(_bytes(source), rng)
    before, alpha_now = source * alpha + old * (1 - alpha), alpha * subject[..., None]
    return before, source * alpha_now + other * (1 - alpha_now)


def _shadow(
    source: Levels, subject: Levels, other: Levels, rng: np.random.Generator
) -> tuple[Levels, Levels]:
    """The redraw has a soft shadow, below the subject."""
    down = rng.uniform(0.03, 0.08) * len(subject)
    soft = rng.uniform(6, 16) * len(subject) / _SIDE
    shade = ndimage.gaussian_filter(ndimage.shift(subject, (down, 0), order=1), soft)
    other = other * (1 - rng.uniform(0.15, 0.45) * shade[..., None])
    alpha = subject[..., None]
    return source, source * alpha + other * (1 - alpha)


def _flat(
    source: Levels, subject: Levels, other: Levels, rng: np.random.Generator
) -> tuple[Levels, Levels]:
    """The subject has one colour."""
    colour, alpha = rng.uniform(30, 225, 3), subject[..., None]
    return colour * alpha + source * (1 - alpha), colour * alpha + other * (1 - alpha)


def restyle(rng: np.random.Generator, how: str, side: int = 704, drawn: int = 512) -> Replaced:
    """Return a photograph that was edited as a whole."""
    name = str(rng.choice(PHOTOGRAPHS))
    source = _cut(photograph(name), side, rng)
    truth = _bytes(RESTYLE[how](source.astype(float), rng))
    return _redrawn(f"{how}-{name}", source, truth, np.zeros((side, side)), drawn, rng)


def subject_of(
    shape: tuple[int, int], outline: str, share: float, blur: float, rng: np.random.Generator
) -> Levels:
    """Return a subject's opacity: one shape, or two, with a border that is `blur` pixels wide."""
    if outline == "two":
        halves = [_field(shape, kind, rng) for kind in rng.choice(OUTLINES[:2], 2)]
        width = shape[1] // 2
        field = np.concatenate([half[:, : shape[1]][:, ::2][:, :width] for half in halves], axis=1)
    else:
        field = _field(shape, outline, rng)
    edge = field > np.quantile(field, 1 - share)
    return np.clip(ndimage.gaussian_filter(edge.astype(float), blur / 2.5), 0, 1)


def _field(shape: tuple[int, int], outline: str, rng: np.random.Generator) -> Levels:
    """Return a height that a shape of any area is above a level of."""
    y, x = (np.mgrid[: shape[0], : shape[1]] + 0.5) / np.array(shape)[:, None, None]
    y, x = y - rng.uniform(0.42, 0.58), x - rng.uniform(0.42, 0.58)
    turn = rng.uniform(0, np.pi)
    ratio = rng.uniform(0.7, 1.0)
    u, v = np.cos(turn) * x + np.sin(turn) * y, (np.cos(turn) * y - np.sin(turn) * x) / ratio
    if outline == "polygon":
        sides = int(rng.integers(4, 8))
        turns = 2 * np.pi * (np.arange(sides) + rng.uniform(-0.2, 0.2, sides)) / sides
        far = rng.uniform(0.8, 1.2, sides)
        planes = [(np.cos(t) * u + np.sin(t) * v) / f for t, f in zip(turns, far, strict=True)]
        return -np.max(planes, axis=0)
    field = -np.hypot(u, v)
    if outline == "noise":
        rough = ndimage.gaussian_filter(rng.normal(size=shape), min(shape) / 14)
        field = field + 0.07 * rough / rough.std()
    return np.asarray(field)


def _cut(pixels: Pixels, side: int, rng: np.random.Generator) -> Pixels:
    """Return a square part of a photograph at this side."""
    part = int(min(pixels.shape[:2]) * rng.uniform(0.75, 1.0))
    top, left = (int(rng.integers(0, n - part + 1)) for n in pixels.shape[:2])
    return fitted(pixels[top : top + part, left : left + part], (side, side))


def _bytes(levels: Levels) -> Pixels:
    return np.clip(np.round(levels), 0, 255).astype(np.uint8)


def _redrawn(
    name: str, source: Pixels, truth: Pixels, subject: Levels, drawn: int, rng: np.random.Generator
) -> Replaced:
    """Return a redraw: shift up to 3 pixels, zoom 1 %, cast 3 %, blur, grain, warp."""
    reference, levels = fitted(source, (drawn, drawn)), fitted(truth, (drawn, drawn)).astype(float)
    levels = ndimage.gaussian_filter(levels, (0.5, 0.5, 0))
    warp = ndimage.gaussian_filter(rng.normal(size=(2, drawn, drawn)), (0, 16, 16))
    warp *= rng.uniform(0, 0.3) / max(1e-9, float(warp.std()))
    zoom, shift = 1 + rng.uniform(-0.01, 0.01), rng.uniform(-3, 3, 2)
    levels = moved(levels, zoom, shift, warp)
    levels = levels * rng.uniform(0.97, 1.03, 3)
    grain = ndimage.gaussian_filter(rng.normal(size=levels.shape), (0.7, 0.7, 0))
    levels += grain / grain.std() * rng.uniform(0.5, 2.0)
    return Replaced(name, source, _bytes(levels), reference, subject, truth)


def _white(source: Pixels, rng: np.random.Generator) -> Levels:
    return np.full(source.shape, 255.0)


def _gradient(source: Pixels, rng: np.random.Generator) -> Levels:
    ends = rng.uniform(0, 255, (2, 3))
    ramp = np.linspace(0, 1, source.shape[0])[:, None, None]
    return np.broadcast_to(ends[0] * (1 - ramp) + ends[1] * ramp, source.shape)


def _other(source: Pixels, rng: np.random.Generator) -> Levels:
    # Upside down: the photograph itself would be no other.
    other = photograph(str(rng.choice(PHOTOGRAPHS)))[::-1]
    return _cut(other, source.shape[0], rng).astype(float)


def _sepia(source: Levels, rng: np.random.Generator) -> Levels:
    return source.mean(-1, keepdims=True) * np.array([1.1, 0.95, 0.7])


def _night(source: Levels, rng: np.random.Generator) -> Levels:
    return source * np.array([0.3, 0.35, 0.55]) + (0, 0, 12)


def _gain(source: Levels, rng: np.random.Generator) -> Levels:
    return source * rng.choice([0.55, 0.7, 1.4, 1.7])


def _paint(source: Levels, rng: np.random.Generator) -> Levels:
    reach = int(rng.integers(7, 14))
    soft = ndimage.median_filter(source, (reach, reach, 1))
    return np.round(soft / 32) * 32 * rng.uniform(0.9, 1.1, 3)


def _edges(source: Levels, rng: np.random.Generator) -> Levels:
    soft = ndimage.gaussian_filter(source.mean(-1), 1.5)
    edges = np.hypot(*np.gradient(soft)) * 8
    drawing = 255 - edges if rng.random() < 0.5 else edges
    return np.repeat(drawing[..., None], 3, axis=2)


def _hue(source: Levels, rng: np.random.Generator) -> Levels:
    hsv = np.array(Image.fromarray(_bytes(source)).convert("HSV"))
    hsv[..., 0] += np.uint8(rng.integers(40, 216))
    return np.array(Image.fromarray(hsv, "HSV").convert("RGB")).astype(float)


def _whole_other(source: Levels, rng: np.random.Generator) -> Levels:
    return _other(_bytes(source), rng)


def _faded(source: Levels, rng: np.random.Generator) -> Levels:
    grey = source.mean(-1, keepdims=True)
    return 128 + 0.6 * (grey + 0.4 * (source - grey) - 128) + 15


def _tinted(source: Levels, rng: np.random.Generator) -> Levels:
    tint = rng.uniform(0.6, 1.25, 3)
    return source * tint / tint.mean()


BACKDROP: dict[str, Callable[[Pixels, np.random.Generator], Levels]] = {
    "white": _white,
    "gradient": _gradient,
    "photograph": _other,
}
TRAIT: dict[
    str,
    Callable[[Levels, Levels, Levels, np.random.Generator], tuple[Levels, Levels]],
] = {"cutout": _cutout, "hair": _hair, "glass": _glass, "shadow": _shadow, "flat": _flat}
RESTYLE: dict[str, Callable[[Levels, np.random.Generator], Levels]] = {
    "sepia": _sepia,
    "night": _night,
    "gain": _gain,
    "paint": _paint,
    "edges": _edges,
    "hue": _hue,
    "other": _whole_other,
    "faded": _faded,
    "tinted": _tinted,
}
