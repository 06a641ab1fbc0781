"""Find weights that a download never wrote: zeros in a file that was made at its full size.

Some weights are zero by right: biases, new projections, rows of an embedding without a token. Each
of these is a whole tensor, or whole rows of one. What a download leaves begins anywhere. It is
followed by everything behind it in the file, or it is a hole that the disk never stored.
"""

import math
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from hyimg_cli.files import opened
from hyimg_cli.loading.checkpoint import FLOATS, TensorInfo, Tensors, fault, readable
from hyimg_cli.spec.units import names_text

_PIECE_BYTES, _SCAN_BYTES, _HOLE_BYTES = 1 << 12, 1 << 20, 1 << 20
# Matrices without a number at the end of a file, and their least share of it: more than new layers.
_FEWEST, _LEAST = 2, 0.1
# As many zeros at the end of a row are no accident if the next tensor is zero, too.
_FEW_NUMBERS = 64
_HINT = "the download was cut short: download or copy the file again"


def refuse_unfilled(folder: Path, found: Tensors, part: str = "") -> None:
    """Raise CheckpointError for a file of weights of which a part was never written.

    Reads a few pages of each tensor. A file without any number passes: it is no download.
    """
    every = [pair for name, info in found.items() for pair in (info.parts or {name: info}).items()]
    for file, tensors in groupby(sorted(every, key=_place), lambda pair: pair[1].file):
        with readable(folder / file), opened(folder / file) as handle:
            names = _unfilled(handle.fileno(), [pair for pair in tensors if pair[1].bytes])
        if names:
            title = f"{part}: " if part else ""
            what = f"{title}{file} was not filled: it has zeros in place of {names_text(names)}"
            raise fault("unfilled", what, folder, _HINT)


def _place(pair: tuple[str, TensorInfo]) -> tuple[str, int]:
    return pair[1].file, pair[1].start


def _unfilled(file: int, tensors: Sequence[tuple[str, TensorInfo]]) -> list[str]:
    """Return the names of tensors of a file, in its order, whose numbers were not written."""
    names, infos = [name for name, _ in tensors], [info for _, info in tensors]
    zeros = [_zeros_at_end(file, info) for info in infos]
    is_zero = [count == info.bytes for count, info in zip(zeros, infos, strict=True)]
    if all(is_zero):
        return []
    if torn := [
        name
        for name, info in tensors
        if any(_is_torn(file, info, *one) for one in _holes(file, info))
    ]:
        return torn
    for at, info in enumerate(infos):
        end = at + 1
        while end < len(infos) and is_zero[end]:
            end += 1
        if _is_cut(info, zeros[at], infos[at + 1 : end]):
            return names[at:end]
    first = len(infos)
    while is_zero[first - 1]:
        first -= 1
    matrices = sum(len(info.shape) > 1 for info in infos[first:])
    share = sum(info.bytes for info in infos[first:]) / sum(info.bytes for info in infos)
    return names[first:] if matrices >= _FEWEST and share >= _LEAST else []


def _holes(file: int, info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Yield the start and end, in a tensor, of large parts that the disk never stored."""
    at, end = info.start, info.start + info.bytes
    while at < end:
        try:
            begin = os.lseek(file, at, os.SEEK_HOLE)
        except OSError:  # not on this file system
            return
        if begin >= end:
            return
        try:
            at = min(os.lseek(file, begin, os.SEEK_DATA), end)
        except OSError:  # the file ends with it
            at = end
        if at - begin >= _HOLE_BYTES:
            yield begin - info.start, at - info.start


def _is_torn(file: int, info: TensorInfo, begin: int, end: int) -> bool:
    """Return True if the zeros around a hole begin or end inside a row.

    A copy may leave out zeros of the author, too: those are whole rows.
    """
    if info.dtype not in (*FLOATS, "F8_E4M3"):
        return False
    before = os.pread(file, min(begin, _SCAN_BYTES), info.start + max(0, begin - _SCAN_BYTES))
    after = os.pread(file, min(info.bytes - end, _SCAN_BYTES), info.start + end)
    row = info.bytes // info.shape[0]
    begin = max(begin - (len(before) - len(before.rstrip(b"\0"))), 0)
    end += len(after) - len(after.lstrip(b"\0"))
    # A value next to the zeros may be small: its bytes are zero but for some.
    width = info.bytes // math.prod(info.shape)
    begin, end = -(-begin // width) * width, end // width * width
    return begin % row > 0 or end % row > 0


def _is_cut(info: TensorInfo, zeros: int, after: Sequence[TensorInfo]) -> bool:
    """Return True if the zeros at the end of a tensor, and of those after it, are no accident."""
    if info.dtype not in (*FLOATS, "F8_E4M3") or not 0 < zeros < info.bytes:
        return False
    width = info.bytes // math.prod(info.shape)
    row, count = info.bytes // info.shape[0] // width, zeros // width
    if any(len(one.shape) > 1 for one in after) and count >= min(row, _FEW_NUMBERS) > 1:
        return True
    return count % row > 0 and (count > row or (len(after) > 0 and count >= _FEW_NUMBERS))


def _zeros_at_end(file: int, info: TensorInfo) -> int:
    """Count the zero bytes at the end of a tensor. One that is zero in three places is all zero."""

    def zeros(start: int, count: int) -> int:
        piece = os.pread(file, count, info.start + start)
        return len(piece) - len(piece.rstrip(b"\0"))

    size = min(_PIECE_BYTES, info.bytes)
    end = zeros(info.bytes - size, size)
    if end < size or size == info.bytes:
        return end
    if zeros(0, size) == zeros((info.bytes - size) // 2, size) == size:
        return info.bytes
    found, left = 0, info.bytes
    while left:
        size = min(_SCAN_BYTES, left)
        end = zeros(left - size, size)
        found, left = found + end, left - size
        if end < size:
            break
    return found
