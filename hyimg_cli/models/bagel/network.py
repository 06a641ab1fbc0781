"""The network: its modules under their released names, and the things it computes.

encode_source ▸ a source image's rows      prefill, feed ▸ context K/V, last state
text_logits   ▸ the next token's logits    velocities ▸ one denoise step of all branches
"""

# Legend: T new token, N image token, M model width, P values of a latent token or patch, G branch,
# C channel, Y X latent rows and columns, V vocabulary
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn

from hyimg_cli.kernels.rows import pad_rows
from hyimg_cli.kernels.transfer import to_device
from hyimg_cli.kv.arena import Arena, Storage, page_rows
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.bagel.config import BagelShape, VisionShape
from hyimg_cli.models.bagel.decoder import NewTokens, PairedDecoder
from hyimg_cli.models.bagel.guidance import packed, unpacked
from hyimg_cli.models.bagel.sequence import BlockLayout
from hyimg_cli.models.common.attention import (
    appended_spans,
    canvas_block,
    commit_rows,
    kept_blocks,
)
from hyimg_cli.models.common.layers import TimestepEmbedder, VitEncoder, embed
from hyimg_cli.models.common.model import buffer_of
from hyimg_cli.models.common.spans import Grid, QuerySpan
from hyimg_cli.models.protocols import Context, DenoiseInput, Prefill

_IMAGES = ("vae", "vit", "noise")


@dataclass(frozen=True)
class ImageRows:
    """A source image as token rows, without markers: clean latents [N, M], patches [N, M]."""

    vae_NM: Tensor
    vit_NM: Tensor


@dataclass(frozen=True)
class NoiseBranch:
    """One guidance branch while denoising: its noise block after its context."""

    buffer: Buffer
    span: QuerySpan
    positions: Sequence[int]
    is_gen: Sequence[bool]
    grid: Grid

    @property
    def new(self) -> NewTokens:
        """The tokens of the next step."""
        return NewTokens(canvas_block(self.buffer, [self.span]), self.positions, self.is_gen)


class PlaceTable(nn.Module):
    """A row for each place of a square grid; frozen, but stored in the checkpoint."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side = side
        self.pos_embed = nn.Parameter(torch.empty(side**2, width))

    def forward(self, grid: Grid) -> Tensor:
        return self.pos_embed[to_device(grid.places(self.side), self.pos_embed.device)]


class VisionEmbeddings(nn.Module):
    """Patches as rows of the ViT; each place has its row in the table of the whole square."""

    def __init__(self, arch: VisionShape) -> None:
        super().__init__()
        self.side = math.isqrt(arch.positions)
        # A patch's values are ordered (row, column, channel), as for a matrix; a convolution would
        # expect another order.
        self.patch_embedding = nn.Linear(arch.patch_values, arch.hidden_size)
        self.position_embedding = nn.Embedding(arch.positions, arch.hidden_size)

    def forward(self, patches_NP: Tensor, grid: Grid) -> Tensor:
        places_N = to_device(grid.places(self.side), patches_NP.device)
        return self.patch_embedding(patches_NP) + self.position_embedding(places_N)


class VisionTransformer(nn.Module):
    """SigLIP without its pooling head."""

    def __init__(self, arch: VisionShape) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(arch)
        self.encoder = VitEncoder(arch)
        self.post_layernorm = nn.LayerNorm(arch.hidden_size, eps=arch.layer_norm_eps)

    def forward(self, patches_NP: Tensor, grid: Grid) -> Tensor:
        rows_1NM: Tensor = self.embeddings(patches_NP, grid)[None]
        out: Tensor = self.post_layernorm(self.encoder(rows_1NM))
        return out[0]


class BagelNetwork(nn.Module):
    """All of `ema.safetensors`: everything but the VAE."""

    def __init__(self, arch: BagelShape) -> None:
        super().__init__()
        self.arch = arch
        width, values = arch.decoder.hidden_size, arch.patch_values
        head = nn.Linear(width, arch.decoder.vocab_size, bias=False)
        self.language_model = nn.ModuleDict({"model": PairedDecoder(arch.decoder), "lm_head": head})
        self.time_embedder = TimestepEmbedder(width, nn.SiLU())
        self.vae2llm, self.llm2vae = nn.Linear(values, width), nn.Linear(width, values)
        self.latent_pos_embed = PlaceTable(arch.table_side, width)
        # From the ViT's width to the decoder's.
        self.connector = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(arch.vision.hidden_size, width),
                activation=nn.GELU(approximate="tanh"),
                fc2=nn.Linear(width, width),
            )
        )
        self.vit_pos_embed = PlaceTable(arch.vision.table_side, width)
        self.vit_model = nn.ModuleDict({"vision_model": VisionTransformer(arch.vision)})
        # Rows of branches, in denoise steps.
        self.branch_forwards = 0

    @property
    def decoder(self) -> PairedDecoder:
        return cast(PairedDecoder, self.language_model["model"])

    @property
    def weight(self) -> Tensor:
        """Return a weight with the network's device and dtype."""
        return cast(nn.Linear, self.language_model["lm_head"]).weight

    @cached_property
    def arena(self) -> Arena:
        """The K/V of all sequences, made once the weights are in place."""
        arch, device = self.arch.decoder, self.weight.device
        storage = Storage(
            kv_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            dtype=self.weight.dtype,
            devices=[device] * arch.num_hidden_layers,
        )
        return Arena(storage, page_rows(device))

    def new_buffer(self) -> Buffer:
        """Return an empty buffer for one context."""
        return Buffer(self.arena)

    def encode_source(self, latents_CYX: Tensor, patches_NP: Tensor, vit: Grid) -> ImageRows:
        """Return the token rows of a source image, from its scaled latents and its patches.

        A source image is clean, without noise.
        """
        seen_NM = self.vit_model["vision_model"](patches_NP.to(self.weight.dtype), vit)
        connected_NM: Tensor = self.connector(seen_NM) + self.vit_pos_embed(vit)
        return ImageRows(self.latent_rows(latents_CYX, 0.0), connected_NM)

    def latent_rows(self, latents_CYX: Tensor, sigma: float) -> Tensor:
        """Return the token rows of latents at a noise level, [N, M]."""
        rows_NP = packed(latents_CYX.to(self.weight.device)).to(self.weight.dtype)
        grid = Grid(latents_CYX.shape[-2] // 2, latents_CYX.shape[-1] // 2)
        level_1 = torch.full((1,), sigma, device=self.weight.device)
        rows: Tensor = self.vae2llm(rows_NP) + self.time_embedder(level_1)
        return rows + self.latent_pos_embed(grid)

    def prefill(self, prefills: Sequence[Prefill]) -> list[Tensor]:
        """Complete the buffers' prefixes in one forward; return each last token's state [M]."""
        buffers = [one.buffer for one in prefills]
        rows, spans, facts = zip(*map(self._entering, prefills), strict=True)
        blocks = kept_blocks([*zip(buffers, spans, strict=True)])
        new = [NewTokens(block, *fact) for block, fact in zip(blocks, facts, strict=True)]
        return commit_rows(buffers, blocks, self.decoder(torch.cat(rows), new))

    def _entering(
        self, prefill: Prefill
    ) -> tuple[Tensor, Sequence[QuerySpan], tuple[Sequence[int], Sequence[bool]]]:
        """Return the rows of a prefill, their mask, and their positions and kinds."""
        layout, ids, sources, buffer, stop = prefill
        start = buffer.length
        x_TM = embed(self.decoder.embed_tokens, [max(0, id_) for id_ in ids[start:stop]])
        is_gen = [False] * (stop - start)
        for block in layout.blocks:
            if block.kind in _IMAGES and start <= block.start < stop:
                inside = slice(block.start + 1 - start, block.stop - 1 - start)
                rows = sources[block.source]
                x_TM[inside] = rows.vae_NM if block.kind == "vae" else rows.vit_NM
                is_gen[inside] = [block.kind == "vae"] * block.grid.cells
        return x_TM, layout.spans(start, stop), (layout.positions(start, stop), is_gen)

    def feed(self, runs: Sequence[tuple[Context, Sequence[int] | Tensor]]) -> list[Tensor]:
        """Append text to each context in one forward; return each run's last state [M]."""
        new: list[NewTokens] = []
        buffers = [buffer_of(context) for context, _ in runs]
        spans = appended_spans(zip(buffers, (len(ids) for _, ids in runs), strict=True))
        blocks = kept_blocks([(b, [span]) for b, span in zip(buffers, spans, strict=True)])
        for (context, ids), span, block in zip(runs, spans, blocks, strict=True):
            shift = context.layout.rope_shift
            positions = range(span.start - shift, span.stop - shift)
            new.append(NewTokens(block, positions, [False] * len(ids)))
        hidden_TM = self.decoder(
            torch.cat([embed(self.decoder.embed_tokens, ids) for _, ids in runs]), new
        )
        return commit_rows(buffers, blocks, hidden_TM)

    def text_logits(self, hidden_RM: Tensor) -> Tensor:
        """Return next-token logits [R, V], float32."""
        padded_RM = pad_rows(hidden_RM, self.decoder.row_multiple)
        logits: Tensor = self.language_model["lm_head"](padded_RM)
        return logits[: len(hidden_RM)].float()

    def branch(self, layout: BlockLayout, buffer: Buffer) -> NoiseBranch:
        """Return a branch ready to denoise; its context is complete in `buffer`."""
        noise = layout.blocks[-1]
        assert noise.kind == "noise", "a branch has a picture to draw"
        assert buffer.length == noise.start, "the context is complete before denoising"
        # Its markers attend to the noise, so they are also computed again, but are not latents.
        is_gen = [False, *[True] * noise.grid.cells, False]
        positions = [noise.rope] * len(is_gen)
        span = QuerySpan(noise.start, noise.stop, is_causal=False)
        return NoiseBranch(buffer, span, positions, is_gen, noise.grid)

    def velocities(
        self, pictures: Sequence[DenoiseInput], markers: tuple[int, int]
    ) -> list[Tensor]:
        """Return the velocity of every picture's branches, [G, C, Y, X] each, float32, unguided."""
        first_M, last_M = embed(self.decoder.embed_tokens, markers).split(1)
        rows = []
        for live in pictures:
            latents_NM = self.latent_rows(live.latents_CYX, live.step.sigma)
            rows += [torch.cat([first_M, latents_NM, last_M])] * len(live.branches)
        branches: list[NoiseBranch] = [branch for live in pictures for branch in live.branches]
        self.branch_forwards += len(branches)
        hidden_TM = self.decoder(torch.cat(rows), [branch.new for branch in branches])
        states = hidden_TM.split([len(one) for one in rows])
        found = [
            unpacked(self.llm2vae(state_TM[1:-1]).float(), branch.grid.rows, branch.grid.columns)
            for branch, state_TM in zip(branches, states, strict=True)
        ]
        of_branches = iter(found)
        return [torch.stack([*islice(of_branches, len(live.branches))]) for live in pictures]
