"""Rows of transformers that compute pictures and texts once, as a prefix; no torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hyimg_cli.models.common.tokenizer import read_tokenizer
from hyimg_cli.spec.job import Size

# A row is of so many pixels' side.
_SIDE = 16
# What Qwen-Image-2.1 is given of a job, behind its system prompt.
_HEAD, _TAIL = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
_PAD = "<|image_pad|>"
_SHOWN = "<image{}><|vision_start|>" + _PAD + "<|vision_end|>"
# Rows to which klein fills up its texts, and its result where nothing says another; no reference is
# of a larger area.
_KLEIN_TEXT, _KLEIN_SIZE = 512, Size(1024, 1024)


@dataclass(frozen=True)
class PrefixRows:
    """Of one guidance branch: of the prefix's segments, and of each step behind them."""

    segments: tuple[int, ...]
    per_step: int


# Of a prompt, its sources' sizes and the size that was asked for; by name of `prefix.PREFIXES`.
CountRows = Callable[[str, Sequence[Size], Size | None], PrefixRows]


def pictures_then_text(folder: Path, side: int) -> CountRows:
    """By a checkpoint's own tokenizer; references are brought to the area of a square of `side`."""
    tokenizer = read_tokenizer(folder / "processor")
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
        return PrefixRows((*([pictures] if last else ()), len(ids) - last), _rows(canvas))

    return count


def references(folder: Path, side: int) -> CountRows:
    """Of FLUX.2 klein, which shrinks large references and cuts each to whole rows, whatever `side`
    its card names.
    """

    def count(prompt: str, sources: Sequence[Size], size: Size | None) -> PrefixRows:
        fitted = [_floored(_shrunk(source), _SIDE) for source in sources]
        canvas = size or (fitted[0] if fitted else _KLEIN_SIZE)
        own = sum(map(_rows, fitted))
        return PrefixRows((own,) if own else (), _KLEIN_TEXT + _rows(canvas))

    return count


def _fitted(source: Size, side: int) -> Size:
    width = math.sqrt(side * side * (source.width / source.height))
    height = width / (source.width / source.height)
    step = 2 * _SIDE
    return Size(round(height / step) * step, round(width / step) * step)


def _shrunk(source: Size) -> Size:
    scale = math.sqrt(_KLEIN_SIZE.height * _KLEIN_SIZE.width / (source.height * source.width))
    if scale >= 1:
        return source
    return Size(int(source.height * scale), int(source.width * scale))


def _floored(size: Size, step: int) -> Size:
    return Size(size.height // step * step, size.width // step * step)


def _rows(size: Size) -> int:
    return size.height * size.width // _SIDE**2


COUNTS: dict[str, Callable[[Path, int], CountRows]] = {
    "pictures, then text": pictures_then_text, "references": references,
}  # fmt: skip
