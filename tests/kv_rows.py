"""Rows of a buffer, read or changed wherever its pages are."""

from collections.abc import Callable, Iterator

from torch import Tensor

from hyimg_cli.kv.buffer import Buffer


def read(buffer: Buffer, layer: int, stop: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the first `stop` rows, [K, stop, D] each."""
    keys, values = buffer.arena.storage.read(layer, buffer.span(0, stop))
    return keys.transpose(0, 1), values.transpose(0, 1)


def sides(buffer: Buffer) -> Iterator[Tensor]:
    """Copies of all layers' keys, then values, [S, K, D] of the committed rows."""
    slots = buffer.span(0, buffer.length)
    storage = buffer.arena.storage
    for all_SKD in (*storage.keys_SKD, *storage.values_SKD):
        yield all_SKD[slots.index(all_SKD.device)]


def unshare(buffer: Buffer) -> None:
    """Give a buffer pages of its own, with the same rows."""
    copies = [buffer.arena.copied(page) for page in buffer.pages]
    buffer.arena.pages.drop([*buffer.pages])
    buffer.pages[:] = copies


def change(
    buffer: Buffer,
    start: int,
    stop: int,
    new: Callable[[Tensor], Tensor | float],
    sides: str = "kv",
) -> None:
    """Replace committed rows [start, stop) in all layers, for this buffer alone."""
    unshare(buffer)
    slots, storage = buffer.span(start, stop), buffer.arena.storage
    known = {"k": storage.keys_SKD, "v": storage.values_SKD}
    for all_SKD in [side for name in sides for side in known[name]]:
        index_S = slots.index(all_SKD.device)
        all_SKD[index_S] = new(all_SKD[index_S])
