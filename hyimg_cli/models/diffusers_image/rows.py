"""Rows of an editor's transformer, of those that compute pictures and texts once as a prefix, too;
no torch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hyimg_cli.models.common.tokenizer import read_tokenizer
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import Size

# A row is of so many pixels' side.
_SIDE = 16
# What Qwen-Image-2.1 is given of a job, behind its system prompt.
_HEAD, _TAIL = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
_PAD = "<|image_pad|>"
_SHOWN = "<image{}><|vision_start|>" + _PAD + "<|vision_end|>"
# Of a result where nothing says another; no reference is of a larger area.
_SIZE = Size(1024, 1024)
# Rows to which klein fills up its texts; and of a prompt, template and all, that nobody counts.
_KLEIN_TEXT, _ANY_TEXT = 512, 256


@dataclass(frozen=True)
class PrefixRows:
    """Of one guidance branch: of the prefix's segments by what they are of (`pictures`, `text`),
    and of each step behind them.
    """

    segments: dict[str, int]
    per_step: int


# Of a prompt, its sources' sizes and the size that was asked for; by name of `prefix.PREFIXES`.
CountRows = Callable[[str, Sequence[Size], Size | None], PrefixRows]


def without_prefix(folder: Path, card: ModelCard) -> CountRows:
    """Of transformers whose rows all change from step to step."""

    def count(prompt: str, sources: Sequence[Size], size: Size | None) -> PrefixRows:
        pixels, most = _area(size or _SIZE), _area(_SIZE)
        for own in map(_area, sources):
            # A source whose size is not known has one pixel.
            pixels += most if card.reference_pixels or own == 1 else min(own, most)
        return PrefixRows({}, pixels // _SIDE**2 + _ANY_TEXT)

    return count


def pictures_then_text(folder: Path, card: ModelCard) -> CountRows:
    """By a checkpoint's own tokenizer; references are brought to the area of the card's square."""
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
        return PrefixRows(
            ({"pictures": pictures} if last else {}) | {"text": len(ids) - last}, _rows(canvas)
        )

    return count


def references(folder: Path, card: ModelCard) -> CountRows:
    """Of FLUX.2 klein, which shrinks large references and cuts each to whole rows, whatever side
    its card names.
    """

    def count(prompt: str, sources: Sequence[Size], size: Size | None) -> PrefixRows:
        fitted = [_floored(_shrunk(source), _SIDE) for source in sources]
        canvas = size or (fitted[0] if fitted else _SIZE)
        own = sum(map(_rows, fitted))
        return PrefixRows({"pictures": own} if own else {}, _KLEIN_TEXT + _rows(canvas))

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
}  # fmt: skip
