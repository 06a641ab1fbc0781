"""Blocks of new tokens of several sequences, as a forward has them: for attention in one call."""

import torch

from hyimg_cli.kv.arena import CPU_PAGE, Arena, Storage
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.common.attention import (
    QueryBlock,
    appended_spans,
    canvas_block,
    kept_blocks,
)
from hyimg_cli.models.common.spans import query_spans

CPU, HALF = torch.device("cpu"), torch.bfloat16


class Scene:
    """Sequences of some lengths in an arena of one layer, whose pages lie in no order."""

    def __init__(self, *lengths: int, kv_heads: int = 2, width: int = 8) -> None:
        torch.manual_seed(len(lengths))
        storage = Storage(kv_heads=kv_heads, head_dim=width, dtype=HALF, devices=[CPU])
        self.buffers = [Buffer(Arena(storage, CPU_PAGE)) for _ in lengths[:1]]
        arena = self.buffers[0].arena
        self.buffers += [Buffer(arena) for _ in lengths[1:]]
        for part in range(max(lengths) // CPU_PAGE + 1):
            for buffer, length in zip(self.buffers, lengths, strict=True):
                buffer.reserve(min(length, (part + 1) * CPU_PAGE))
        for buffer, length in zip(self.buffers, lengths, strict=True):
            buffer.commit(length)

    def canvases(self, full: int = 10) -> list[QueryBlock]:
        """A row that is causal, then a picture that sees all: branches as they are denoised."""
        return [
            canvas_block(one, query_spans(at, at + 1 + full, [(at + 1, at + 1 + full)]))
            for one in self.buffers
            for at in [one.length]
        ]

    def pictures(self) -> list[QueryBlock]:
        """Nothing but a picture, as BAGEL has its noise."""
        return [
            canvas_block(
                one, query_spans(one.length, one.length + 6, [(one.length, one.length + 6)])
            )
            for one in self.buffers
        ]

    def prefixes(self) -> list[QueryBlock]:
        """Texts around a source picture, cut where they may be shared."""
        spans = [
            query_spans(at, at + 30, [(at + 5, at + 17)], (at + 2, at + 20))
            for at in (one.length for one in self.buffers)
        ]
        return kept_blocks([*zip(self.buffers, spans, strict=True)])

    def texts(self) -> list[QueryBlock]:
        """A token of each sequence, and two of the last one."""
        runs = [(one, 1) for one in (*self.buffers, self.buffers[-1])]
        spans = [[span] for span in appended_spans(runs)]
        return kept_blocks([(one, span) for (one, _), span in zip(runs, spans, strict=True)])
