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


def refuse_slots(rank: Rank, refusals: int) -> None:
    """Task: the next slots cannot be had on a rank above 0."""
    storage, left = rank.parts[PART].storage, [refusals]
    original = vars(type(storage))["resize"]

    def resize(slots: int) -> Any:
        if left[0] and slots > storage.slots:
            left[0] -= 1
            raise torch.OutOfMemoryError("no room for slots")
        return original(storage, slots)

    storage.resize = resize


def slots(rank: Rank) -> int:
    """Task: how many slots a rank above 0 has."""
    return int(rank.parts[PART].storage.slots)
