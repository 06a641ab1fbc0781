"""Count the rows of an editor's transformer, and of its prefixes; no torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from hyimg_cli.models.common.tokenizer import read_tokenizer
from hyimg_cli.models.diffusers_image.canvas import canvas_of
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import Size

# A row is a square of this side, in pixels.
_SIDE = 16
# The prompt of Qwen-Image-2.1, after its system prompt.
_HEAD, _TAIL = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
_PAD = "<|image_pad|>"
_SHOWN = "<image{}><|vision_start|>" + _PAD + "<|vision_end|>"
# Default size of a result, and the maximum area of a reference.
_SIZE = Size(1024, 1024)
# Rows to which klein pads its texts; rows assumed for a prompt that is not counted.
_KLEIN_TEXT, _ANY_TEXT = 512, 256
# Windows of rows that FLUX.3's texts fill, and at most how many rows.
_WINDOW, _MOST_FLUX3_TEXT = 80, 8192


@dataclass(frozen=True)
class PrefixRows:
    """Rows of one guidance branch: of its prefix's segments, and of each later step."""

    pictures: int
    text: int
    per_step: int

    @property
    def prefix(self) -> int:
        return self.pictures + self.text


# Counts from a prompt, its sources' sizes and the requested size.
CountRows = Callable[[str, Sequence[Size], Size | None], PrefixRows]


def count_layers(layers: int, size: Size) -> PrefixRows:
    """Count for layers: each has the rows of a picture, as their source and their sum have."""
    return PrefixRows(0, 0, (layers + 2) * _rows(size) + _ANY_TEXT)


def without_prefix(folder: Path, card: ModelCard) -> CountRows:
    """Count for transformers whose rows all change at each step."""

    def count(prompt: str, sources: Sequence[Size], size: Size | None) -> PrefixRows:
        pixels, most = _area(size or _SIZE), _area(_SIZE)
        for own in map(_area, sources):
            # A source of unknown size is passed as one pixel.
            pixels += most if card.reference_pixels or own == 1 else min(own, most)
        return PrefixRows(0, 0, pixels // _SIDE**2 + _ANY_TEXT)

    return count


def pictures_then_text(folder: Path, card: ModelCard) -> CountRows:
    """Count for Qwen-Image-2.1 with its tokenizer; references get the area of the card's square."""
    tokenizer, side = read_tokenizer(folder / "processor"), card.base_size
    pad = tokenizer.token_to_id(_PAD)

    @cache
    def ids_of(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    def count(prompt: str, sources: Sequence[Size], size: Size | None) -> PrefixRows:
        shown = " ".join(_SHOWN.format(number + 1) for number in range(len(sources)))
        ids = ids_of(f"{_HEAD}{shown}{prompt or ' '}{_TAIL}")
        fitted = [_fitted(source, side) for source in sources]
        last = len(ids) - ids[::-1].index(pad) if sources else 0
        pictures = last - len(sources) + sum(map(_rows, fitted))
        canvas = size or (fitted[-1] if fitted else _floored(Size(side, side), 2 * _SIDE))
        return PrefixRows(pictures * bool(last), len(ids) - last, _rows(canvas))

    return count


def references(folder: Path, card: ModelCard) -> CountRows:
    """Count for FLUX.2 klein, which shrinks large references and crops each to whole rows."""

    def count(prompt: str, sources: Sequence[Size], size: Size | None) -> PrefixRows:
        fitted = [_floored(_shrunk(source), _SIDE) for source in sources]
        canvas = size or (fitted[0] if fitted else _SIZE)
        own = sum(map(_rows, fitted))
        return PrefixRows(own, 0, _KLEIN_TEXT + _rows(canvas))

    return count


@lru_cache(maxsize=4)
def text_rows(folder: Path) -> Callable[[str], int]:
    """Return a count of the rows of FLUX.3's texts, which fill whole windows."""
    tokenizer = read_tokenizer(folder / "tokenizer")
    ends = len(tokenizer.encode(_HEAD + _TAIL, add_special_tokens=False).ids)

    @lru_cache(maxsize=4096)
    def count(text: str) -> int:
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids) + ends
        return min(-(-tokens // _WINDOW) * _WINDOW, _MOST_FLUX3_TEXT)

    return count


def windows_of_text(folder: Path, card: ModelCard) -> CountRows:
    """Count for FLUX.3: texts fill whole windows, and sources whole rows."""
    count_text = text_rows(folder)

    def count(prompt: str, sources: Sequence[Size], size: Size | None) -> PrefixRows:
        # A source of unknown size is passed as one pixel.
        known = [_SIZE if _area(one) == 1 else one for one in sources]
        if len(known) == 1:
            fitted = [canvas_of(known[0]).size]
        else:
            fitted = [_floored(_shrunk(one), _SIDE) for one in known]
        canvas = size or (fitted[0] if fitted else _SIZE)
        return PrefixRows(0, 0, count_text(prompt) + sum(map(_rows, (canvas, *fitted))))

    return count


def _fitted(source: Size, side: int) -> Size:
    width = math.sqrt(side * side * (source.width / source.height))
    height = width / (source.width / source.height)
    step = 2 * _SIDE
    return Size(round(height / step) * step, round(width / step) * step)


def _shrunk(source: Size) -> Size:
    scale = math.sqrt(_area(_SIZE) / _area(source))
    if scale >= 1:
        return source
    return Size(int(source.height * scale), int(source.width * scale))


def _floored(size: Size, step: int) -> Size:
    return Size(size.height // step * step, size.width // step * step)


def _area(size: Size) -> int:
    return size.height * size.width


def _rows(size: Size) -> int:
    return _area(size) // _SIDE**2


COUNTS: dict[str, Callable[[Path, ModelCard], CountRows]] = {
    "": without_prefix, "pictures, then text": pictures_then_text, "references": references,
    "windows of text": windows_of_text,
}  # fmt: skip
