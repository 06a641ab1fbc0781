"""Photographs that packages ship, edits of them whose truth is known, and redraws of the results as
a model would give them: for `outside.py` and for the tests.

A redraw is softer, drifted in colour, moved by a little, and has noise and texture of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

Pixels = NDArray[np.uint8]
Levels = NDArray[np.float64]
# Of scikit-image's wheel, in colour.
PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)


@dataclass(frozen=True)
class Case:
    """A source, what a model would have drawn from it, the round trip of what it was shown, and the
    edit's truth: the edited source, and where it differs.
    """

    name: str
    kind: str
    source: Pixels
    drawn: Pixels
    reference: Pixels
    truth: Pixels
    mask: NDArray[np.bool_]


def photograph(name: str) -> Pixels:
    """A photograph of scikit-image's wheel, RGB."""
    import skimage.data

    return np.array(Image.open(Path(skimage.data.__file__).parent / name).convert("RGB"))


def cases(count: int, seed: int, kinds: tuple[str, ...], area: float = 0.4e6) -> Iterator[Case]:
    """Random cases; `area`: pixels that the model draws."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        name = PHOTOGRAPHS[int(rng.integers(len(PHOTOGRAPHS)))]
        source = _varied(photograph(name), rng)
        yield case(f"{number:03}-{kind}-{Path(name).stem}", kind, source, rng, area)


def case(name: str, kind: str, source: Pixels, rng: np.random.Generator, area: float) -> Case:
    """An edit of this kind, and a redraw of it."""
    truth = EDITS[kind](source, rng)
    size = bucket(source.shape[:2], area)
    shown, wanted = (fitted(picture, size) for picture in (source, truth))
    softness = float(rng.uniform(0.3, 0.9)), float(rng.uniform(0.8, 2.5)), int(rng.integers(70, 95))
    reference = vae(shown, *softness)
    drawn = redrawn(vae(wanted, *softness), rng)
    from skimage.color import deltaE_cie76, rgb2lab

    mask = deltaE_cie76(rgb2lab(source), rgb2lab(truth)) > 3
    return Case(name, kind, source, drawn, reference, truth, mask)


def bucket(shape: tuple[int, ...], area: float) -> tuple[int, int]:
    """Sides in steps of 16 with about this area and a ratio near the source's, as models have."""
    ratio = shape[0] / shape[1]
    height = max(64, round((area * ratio) ** 0.5 / 16) * 16)
    return height, max(64, round((area / ratio) ** 0.5 / 16) * 16)


def fitted(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Stretched."""
    return np.array(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.LANCZOS))


def moved(levels: Levels, zoom: float, shift: np.ndarray, warp: np.ndarray) -> Levels:
    """Levels [Y, X, 3] zoomed about their centre, shifted [2] and warped [2, Y, X]."""
    height, width = levels.shape[:2]
    y, x = np.mgrid[:height, :width].astype(float)
    at = [
        (y - height / 2) * zoom + height / 2 + shift[0] + warp[0],
        (x - width / 2) * zoom + width / 2 + shift[1] + warp[1],
    ]
    return np.stack(
        [ndimage.map_coordinates(levels[..., c], at, order=3, mode="nearest") for c in range(3)], -1
    )


def redrawn(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """As a model draws what it was to show."""
    levels = pixels.astype(float)
    height, width = levels.shape[:2]
    # Texture that is stronger or weaker, and grain that hangs together.
    soft = ndimage.gaussian_filter(levels, (1.5, 1.5, 0))
    levels = soft + (levels - soft) * (1 + rng.uniform(-0.4, 0.4))
    grain = ndimage.gaussian_filter(rng.normal(size=levels.shape), (0.8, 0.8, 0))
    levels += grain / grain.std() * rng.uniform(0.5, 3.5)
    # Moved: a smooth warp, a shift, at times a zoom.
    warp = ndimage.gaussian_filter(rng.normal(size=(2, height, width)), (0, 20, 20))
    warp *= rng.uniform(0, 0.7) / max(1e-9, warp.std())
    zoom = 1 + (rng.uniform(-0.012, 0.012) if rng.random() < 0.4 else 0)
    shift = rng.uniform(-3, 3, 2) * np.sqrt(height * width) / 1024
    levels = moved(levels, zoom, shift, warp)
    # Drifted: gains, biases, shading.
    levels = levels * rng.uniform(0.95, 1.05, 3) + rng.uniform(-4, 4, 3)
    shading = ndimage.gaussian_filter(rng.normal(size=(height, width)), max(height, width) / 5)
    levels += (shading / max(1e-9, shading.std()) * rng.uniform(0, 2.5))[..., None]
    return np.clip(np.round(levels), 0, 255).astype(np.uint8)


def vae(pixels: Pixels, luma: float, chroma: float, quality: int) -> Pixels:
    """What a round trip loses."""
    ycc = np.array(Image.fromarray(pixels).convert("YCbCr")).astype(float)
    for channel, sigma in enumerate((luma, chroma, chroma)):
        ycc[..., channel] = ndimage.gaussian_filter(ycc[..., channel], sigma)
    image = Image.fromarray(np.round(ycc).astype(np.uint8), "YCbCr").convert("RGB")
    data = BytesIO()
    image.save(data, "JPEG", quality=quality)
    return np.array(Image.open(data))


def _varied(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """At times larger, with grain; at times cut to an odd aspect."""
    if rng.random() < 0.3:
        factor = rng.uniform(1.3, 2.2)
        size = round(pixels.shape[1] * factor), round(pixels.shape[0] * factor)
        larger = np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
        pixels = np.clip(larger + rng.normal(0, 2, larger.shape), 0, 255).astype(np.uint8)
    if rng.random() < 0.4:
        height, width = pixels.shape[:2]
        cut = rng.uniform(0.6, 0.95, 2)
        sides = max(160, int(height * cut[0])), max(160, int(width * cut[1]))
        top, left = (
            int(rng.integers(0, n - m + 1)) for n, m in zip((height, width), sides, strict=True)
        )
        pixels = pixels[top : top + sides[0], left : left + sides[1]].copy()
    return pixels


def _blob(shape: tuple[int, ...], rng: np.random.Generator, low: float, high: float) -> Levels:
    """A round thing with a wavy edge, from 0 to 1, of so much of the picture."""
    height, width = shape[:2]
    part = np.exp(rng.uniform(np.log(low), np.log(high)))
    radius = np.sqrt(part * height * width / np.pi)
    centre = [rng.uniform(min(radius, n / 2), max(n - radius, n / 2)) for n in (height, width)]
    y, x = np.mgrid[:height, :width]
    angle = np.arctan2(y - centre[0], x - centre[1])
    wave = 1 + sum(
        rng.uniform(-0.15, 0.15) * np.sin(n * angle + rng.uniform(0, 6)) for n in (2, 3, 5)
    )
    return np.clip(radius * wave - np.hypot(y - centre[0], x - centre[1]) + 0.5, 0, 1)


def _mixed(source: Pixels, other: Levels, alpha: Levels) -> Pixels:
    mixed = source * (1 - alpha[..., None]) + other * alpha[..., None]
    return np.clip(np.round(mixed), 0, 255).astype(np.uint8)


def _recolour(source: Pixels, rng: np.random.Generator) -> Pixels:
    hsv = np.array(Image.fromarray(source).convert("HSV"))
    hsv[..., 0] += np.uint8(rng.integers(50, 206))
    hsv[..., 1] = np.maximum(hsv[..., 1], 120)
    other = np.array(Image.fromarray(hsv, "HSV").convert("RGB")).astype(float)
    return _mixed(source, other, _blob(source.shape, rng, 0.01, 0.15))


def _paste(source: Pixels, rng: np.random.Generator) -> Pixels:
    # Upside down: a photograph on itself would be no edit.
    other = photograph(PHOTOGRAPHS[int(rng.integers(len(PHOTOGRAPHS)))])[::-1]
    size = source.shape[1], source.shape[0]
    other = np.array(Image.fromarray(other).resize(size, Image.Resampling.BICUBIC)).astype(float)
    alpha = _blob(source.shape, rng, 0.01, 0.2)
    if rng.random() < 0.5:
        far = np.sqrt(alpha.sum() / np.pi) * 0.15
        shadow = ndimage.shift(ndimage.gaussian_filter(alpha, far), (far, far), order=1)
        source = np.clip(source * (1 - 0.5 * shadow[..., None]), 0, 255).astype(np.uint8)
    return _mixed(source, other, alpha)


def _fill(source: Pixels, rng: np.random.Generator) -> Pixels:
    alpha = _blob(source.shape, rng, 0.005, 0.08)
    ring = ndimage.binary_dilation(alpha > 0, iterations=6) & (alpha == 0)
    around = source[ring].mean(0) if ring.any() else source.mean((0, 1))
    other = np.broadcast_to(around, source.shape) + rng.normal(0, 1.5, source.shape)
    return _mixed(source, other, alpha)


def _text(source: Pixels, rng: np.random.Generator) -> Pixels:
    height, width = source.shape[:2]
    font = ImageFont.load_default(size=int(rng.uniform(0.07, 0.16) * height))
    image = Image.fromarray(source)
    word = str(rng.choice(["SALE", "Hello", "2024", "OPEN now", "café"]))
    at = rng.uniform(0.05, 0.4) * width, rng.uniform(0.1, 0.7) * height
    dark = source[int(at[1]) :, int(at[0]) :].mean() < 128
    ink = (250, 245, 220) if dark else tuple(int(v) for v in rng.integers(0, 60, 3))
    ImageDraw.Draw(image).text(at, word, fill=ink, font=font)
    return np.array(image)


def _relight(source: Pixels, rng: np.random.Generator) -> Pixels:
    alpha = _blob(source.shape, rng, 0.03, 0.2)
    soft = ndimage.gaussian_filter(alpha, np.sqrt(alpha.sum() / np.pi) * 0.3)
    gain = rng.uniform(0.15, 0.45) * (1 if rng.random() < 0.5 else -0.8)
    return np.clip(np.round(source * (1 + gain * soft[..., None])), 0, 255).astype(np.uint8)


def _patches(source: Pixels, rng: np.random.Generator) -> Pixels:
    for _ in range(int(rng.integers(2, 5))):
        edit = (_recolour, _fill)[int(rng.integers(2))]
        source = edit(source, rng)
    return source


def _none(source: Pixels, rng: np.random.Generator) -> Pixels:
    return source.copy()


def _style(source: Pixels, rng: np.random.Generator) -> Pixels:
    soft = ndimage.median_filter(source, (9, 9, 1)).astype(float)
    edges = np.abs(ndimage.laplace(ndimage.gaussian_filter(soft.mean(-1), 1.5)))
    flat = np.round(soft / 48) * 48
    return np.clip(flat - 12 * edges[..., None], 0, 255).astype(np.uint8)


def _night(source: Pixels, rng: np.random.Generator) -> Pixels:
    return np.clip(source * np.array([0.3, 0.35, 0.55]) + (0, 0, 12), 0, 255).astype(np.uint8)


def _sepia(source: Pixels, rng: np.random.Generator) -> Pixels:
    grey = source.mean(-1, keepdims=True)
    return np.clip(grey * np.array([1.1, 0.95, 0.7]), 0, 255).astype(np.uint8)


def _background(source: Pixels, rng: np.random.Generator) -> Pixels:
    height, width = source.shape[:2]
    y, x = np.mgrid[:height, :width]
    inside = np.hypot((y / height - 0.5) / 0.3, (x / width - 0.5) / 0.25) - 1
    alpha = np.clip(inside * 60 + 0.5, 0, 1)
    other = photograph(PHOTOGRAPHS[int(rng.integers(len(PHOTOGRAPHS)))])
    flat = np.array(Image.fromarray(other[::-1]).resize((width, height))).astype(float)
    colour = rng.integers(0, 256, 3)
    return _mixed(
        source, flat if rng.random() < 0.5 else np.broadcast_to(colour, flat.shape), alpha
    )


def _reframe(source: Pixels, rng: np.random.Generator) -> Pixels:
    height, width = source.shape[:2]
    cut = rng.uniform(0.75, 0.9)
    sides = int(height * cut), int(width * cut)
    top, left = (
        int(rng.integers(0, n - m + 1)) for n, m in zip((height, width), sides, strict=True)
    )
    part = source[top : top + sides[0], left : left + sides[1]]
    return np.array(Image.fromarray(part).resize((width, height), Image.Resampling.BICUBIC))


LOCAL = ("recolour", "paste", "fill", "text", "relight", "patches")
GLOBAL = ("style", "night", "sepia", "reframe")
EDITS: dict[str, Callable[[Pixels, np.random.Generator], Pixels]] = {
    "recolour": _recolour,
    "paste": _paste,
    "fill": _fill,
    "text": _text,
    "relight": _relight,
    "patches": _patches,
    "none": _none,
    "style": _style,
    "night": _night,
    "sepia": _sepia,
    "background": _background,
    "reframe": _reframe,
}
