"""Training rows: the product's own layouts, padded, with copies of the noisy picture.

A row is everything before the generated picture's `<timestep>`, then `copies` times that timestep
and its image tokens, each copy with its own noise. Copies do not see each other, so each is exactly
the product's sequence, and the prefix is computed once.

Shapes: B row · S token · K copy · N image token.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.hunyuan_image3.rope import positions
from hyimg_cli.models.hunyuan_image3.sequence import (
    Layout,
    LayoutBuilder,
    SourceShape,
    Target,
    sections_of_text,
)
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary
from tiny_world.architecture import LATENT_GRID, RATIO_INDEX, VISION_GRID
from tiny_world.captions import Edit, Wish, recaption, think_about, think_about_edit

Written = Literal["none", "think", "recaption", "think_recaption"]

CELLS = LATENT_GRID**2
_SOURCE = SourceShape(
    ratio_index=RATIO_INDEX,
    vae_grid=Grid(LATENT_GRID, LATENT_GRID),
    vit_grid=Grid(VISION_GRID, VISION_GRID),
    vit_slots=VISION_GRID**2,
)
_TARGET = Target(RATIO_INDEX, Grid(LATENT_GRID, LATENT_GRID))
# How often each kind of written text is trained, for new pictures and for edits.
_SHARES: dict[bool, dict[Written, float]] = {
    False: {"think_recaption": 0.4, "recaption": 0.25, "think": 0.05, "none": 0.3},
    True: {"think_recaption": 0.45, "recaption": 0.25, "think": 0.05, "none": 0.25},
}
_UNCONDITIONAL_SHARE = 0.1
_NO_TARGET = -100
_LENGTH_STEP = 16


@dataclass(frozen=True)
class Row:
    """One sequence: its layout, whether it is the unconditional branch, and where CE applies."""

    layout: Layout
    is_unconditional: bool
    text_start: int

    @property
    def ids(self) -> tuple[int, ...]:
        return self.layout.unconditional_ids if self.is_unconditional else self.layout.ids

    @property
    def prefix(self) -> int:
        assert self.layout.target is not None, "a row has a picture to draw"
        return self.layout.target.live_start


@dataclass(frozen=True)
class Batch:
    """Rows as tensors. `next_ids_BS` is -100 for tokens that are not learnt.

    Index tensors name the slots of image tokens: `timesteps_BK`, `image_BKN` of the generated
    picture, `source_BN` parts of the source picture (None without one).
    """

    ids_BS: Tensor
    next_ids_BS: Tensor
    positions_BS2: Tensor
    visible_BSS: Tensor
    timesteps_BK: Tensor
    image_BKN: Tensor
    source_timestep_B: Tensor | None
    source_vae_BN: Tensor | None
    source_vit_BN: Tensor | None


class RowBuilder:
    """Makes rows of tasks with the product's layout builder."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def row(self, task: Wish | Edit, written: Written, *, is_unconditional: bool = False) -> Row:
        """Return the sequence of a task after its correct text."""
        cot = sections_of_text(self.vocabulary, cot_text(task, written), "instruct")
        layout = self._prompted(task).picture(cot if written != "none" else [], _TARGET)
        opening = self._prompted(task).opening(trigger(written))
        return Row(layout, is_unconditional, opening.length)

    def _prompted(self, task: Wish | Edit) -> LayoutBuilder:
        sources = (_SOURCE,) if isinstance(task, Edit) else ()
        builder = LayoutBuilder(self.vocabulary, has_joint_source_span=True)
        return builder.prompt(task.text, sources=sources)

    def random_row(self, task: Wish | Edit, rng: random.Random) -> Row:
        """Return the same with a random kind of text, sometimes as the unconditional branch."""
        shares = _SHARES[isinstance(task, Edit)]
        written = rng.choices(list(shares), list(shares.values()))[0]
        is_unconditional = rng.random() < _UNCONDITIONAL_SHARE
        return self.row(task, written, is_unconditional=is_unconditional)


def cot_text(task: Wish | Edit, written: Written) -> str:
    """Return the text that the AR stage should write, tags included."""
    if isinstance(task, Edit):
        thought, scene = think_about_edit(task), task.target
    else:
        thought, scene = think_about(task), task.scene
    think = f"<think>{thought}</think>" if "think" in written else ""
    return think + (f"<recaption>{recaption(scene)}</recaption>" if "recaption" in written else "")


def trigger(written: Written) -> str:
    """Return the tag that opens the written text."""
    return {"none": "", "recaption": "<recaption>"}.get(written, "<think>")


def batch(rows: Sequence[Row], vocabulary: Vocabulary, *, copies: int) -> Batch:
    """Return rows of one kind (all with a source, or none), padded to the longest."""
    # Only few lengths: a CPU prepares its kernels again for each.
    longest = max(row.prefix for row in rows) + copies * (1 + CELLS)
    length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    ids_BS = torch.full((len(rows), length), vocabulary.cfg)
    next_ids_BS = torch.full((len(rows), length), _NO_TARGET)
    positions_BS2 = torch.zeros(len(rows), length, 2, dtype=torch.long)
    for index, row in enumerate(rows):
        ids_BS[index, : row.prefix] = torch.tensor(row.ids[: row.prefix])
        next_ids_BS[index, : row.prefix] = _next_ids(row, vocabulary)
        positions_BS2[index, : row.prefix + copies * (1 + CELLS)] = _positions(row, copies)
    prefix_B = torch.tensor([row.prefix for row in rows])
    starts_BK = prefix_B[:, None] + torch.arange(copies) * (1 + CELLS)
    return Batch(
        ids_BS=ids_BS,
        next_ids_BS=next_ids_BS,
        positions_BS2=positions_BS2,
        visible_BSS=_visible(rows, prefix_B, copies, length),
        timesteps_BK=starts_BK,
        image_BKN=starts_BK[..., None] + 1 + torch.arange(CELLS),
        **_source_slots(rows),
    )


def _next_ids(row: Row, vocabulary: Vocabulary) -> Tensor:
    """Return targets for the prefix's next tokens: text, its closing, and the ratio token."""
    targets = torch.full((row.prefix,), _NO_TARGET)
    if row.is_unconditional:
        return targets
    ids = torch.tensor(row.ids[: row.prefix])
    targets[row.text_start - 1 : row.prefix - 1] = ids[row.text_start : row.prefix]
    # The tag or token that opens the answer is forced, not sampled, when nothing is written.
    if row.text_start <= row.prefix - 1 and ids[row.text_start] == vocabulary.answer:
        targets[row.text_start - 1] = _NO_TARGET
    return targets


def _positions(row: Row, copies: int) -> Tensor:
    target = row.layout.target
    assert target is not None, "a row has a picture to draw"
    all_T2 = positions(target.image.stop, row.layout.image_blocks)
    live_T2 = all_T2[target.live_start :]
    return torch.cat([all_T2[: target.live_start], live_T2.repeat(copies, 1)])


def _visible(rows: Sequence[Row], prefix_B: Tensor, copies: int, length: int) -> Tensor:
    """Return which token sees which, [B, S, S].

    Causal in the prefix, full inside a picture; copies do not see each other.
    """
    index_S = torch.arange(length)
    after_BS = index_S - prefix_B[:, None]
    copy_BS = torch.where(after_BS >= 0, after_BS.div(1 + CELLS, rounding_mode="floor") + 1, 0)
    span_BS = torch.where((copy_BS > 0) & (after_BS % (1 + CELLS) > 0), copy_BS + 1, 0)
    for number, row in enumerate(rows):
        for source in row.layout.sources:
            span_BS[number, source.vae.start : source.vit.stop] = 1
    is_padding_BS = copy_BS > copies
    reachable_BSS = (copy_BS[:, None] == 0) | (copy_BS[:, None] == copy_BS[..., None])
    causal_BSS = (index_S[None] <= index_S[:, None])[None] & reachable_BSS
    joint_BSS = (span_BS[:, None] == span_BS[..., None]) & (span_BS[:, None] > 0)
    visible_BSS = (causal_BSS | joint_BSS) & ~is_padding_BS[:, None]
    # A padding query must see something, or its softmax is not a number.
    return visible_BSS | torch.eye(length, dtype=torch.bool)


def _source_slots(rows: Sequence[Row]) -> dict[str, Tensor | None]:
    blocks = [row.layout.sources[0] for row in rows if row.layout.sources]
    if not blocks:
        return {"source_timestep_B": None, "source_vae_BN": None, "source_vit_BN": None}
    assert len(blocks) == len(rows), "rows with and without a source do not share a batch"
    return {
        "source_timestep_B": torch.tensor([block.timestep for block in blocks]),
        "source_vae_BN": torch.stack([torch.arange(b.vae.start, b.vae.stop) for b in blocks]),
        "source_vit_BN": torch.stack([torch.arange(b.vit.start, b.vit.stop) for b in blocks]),
    }
