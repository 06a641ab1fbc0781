"""A rank that runs out of memory on demand: tasks for such tests."""

from collections.abc import Callable, Collection
from itertools import count
from typing import Any

import torch

from hyimg_cli.models.hunyuan_image3.ranked import PART
from hyimg_cli.models.hunyuan_image3.transformer import Transformer
from hyimg_cli.parallel.ranks import Rank


def short(
    layers: Transformer, where: str, most: int = 10**6, at: Collection[int] = ()
) -> Callable[[], None]:
    """Has a part of the second layer fail for more rows than `most`, and in its calls number `at`.
    Undone by a call.
    """
    calls = count()

    def refuse(_module: Any, arguments: Any) -> None:
        if arguments[0].shape[0] > most or next(calls) in at:
            raise torch.OutOfMemoryError(f"no room for {arguments[0].shape[0]} rows")

    assert isinstance(layers.layers[1], torch.nn.Module)
    return layers.layers[1].get_submodule(where).register_forward_pre_hook(refuse).remove


def short_here(rank: Rank, where: str, most: int = 10**6, at: Collection[int] = ()) -> None:
    """Task: the same on a rank above 0, instead of what was asked before."""
    rank.parts.pop("lift", lambda: None)()
    rank.parts["lift"] = short(rank.parts[PART].layers, where, most, at)


def refuse_buffers(rank: Rank, refusals: int) -> None:
    """Task: the next buffers cannot be had on a rank above 0."""
    kv, left = rank.parts[PART].kv, [refusals]
    original = kv.new_buffer

    def new_buffer(capacity: int) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("no room for a buffer")
        return original(capacity)

    kv.new_buffer = new_buffer


def held_parts(rank: Rank) -> int:
    """Task: how many buffers and slices a rank above 0 has."""
    return len(rank.parts[PART].kv.parts)
