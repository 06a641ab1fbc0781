"""The network: its modules under their official names, and the four things it computes.

    encode_source ▸ a source image's rows      prefill ▸ prefix K/V, last hidden row
    text_logits   ▸ the next token's logits    velocity ▸ one denoise step of all branches

Each is a method with its own inputs, not a mode. `sequence` decides which tokens to feed.
"""

# Legend: B batch, C channel, Y X latent rows and columns, G branch, S token in a sequence, T new
# token, M model width, V vocabulary; rope_2TD cosines, then sines
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyimg_cli.kernels.rows import pad_rows
from hyimg_cli.kernels.transfer import current
from hyimg_cli.kv.arena import Arena, Storage, page_rows
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.common.attention import (
    QueryBlock,
    appended_spans,
    canvas_block,
    commit_rows,
    kept_blocks,
)
from hyimg_cli.models.common.layers import TimestepEmbedder, embed
from hyimg_cli.models.common.spans import QuerySpan, query_spans
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.rope import RopeTables
from hyimg_cli.models.hunyuan_image3.sequence import Layout, TargetBlock
from hyimg_cli.models.hunyuan_image3.transformer import Transformer
from hyimg_cli.models.hunyuan_image3.vae import Vae
from hyimg_cli.models.hunyuan_image3.vision import VisionInputs, VisionTower, vision_features
from hyimg_cli.models.protocols import DenoiseInput, Prefill

_NORM_GROUPS = 32


@dataclass(frozen=True)
class SourceRows:
    """A source image as token rows: its `<timestep>` [M], VAE tokens [S, M], ViT slots [S, M]."""

    timestep_M: Tensor
    vae_SM: Tensor
    vit_SM: Tensor


@dataclass(frozen=True)
class Branch:
    """One guidance branch while denoising: its picture's place, live positions and mask."""

    target: TargetBlock
    live_rope_2TD: Tensor
    spans: Sequence[QuerySpan]
    buffer: Buffer

    @property
    def query_block(self) -> QueryBlock:
        """The block of the next step."""
        return canvas_block(self.buffer, self.spans)


class HunyuanImage3ForCausalMM(nn.Module):
    """HunyuanImage-3, base, Instruct and Instruct-Distil, by its config."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        width = arch.hidden_size
        self.model = Transformer(arch)
        self.lm_head = nn.Linear(width, arch.vocab_size, bias=False)
        self.timestep_emb = TimestepEmbedder(width, nn.GELU())
        self.time_embed = TimestepEmbedder(width, nn.GELU())
        self.time_embed_2 = TimestepEmbedder(width, nn.GELU())
        if arch.cfg_distilled:
            self.guidance_emb = TimestepEmbedder(width, nn.GELU())
        if arch.use_meanflow:
            self.timestep_r_emb = TimestepEmbedder(width, nn.GELU())
        self.patch_embed = PatchEmbed(arch)
        self.final_layer = FinalLayer(arch)
        self.vision_model = VisionTower(arch.vision)
        self.vision_aligner = VisionAligner(arch.vision.hidden_size, width)
        self.vae = Vae(arch.vae)
        self.angles = RopeTables(head_dim=arch.head_dim, theta=arch.rope_theta)
        # Number of rank sets; each has all layers, and computes its own guidance branch.
        self.branch_sets = 1

    def encode_source(self, latents_BCYX: Tensor, inputs: VisionInputs) -> SourceRows:
        """Return token rows of a source image, from its scaled latents [1, C, Y, X] and its
        patches.

        Source images are clean: their timestep is 0, in both stages.
        """
        zero_B = torch.zeros(1, device=latents_BCYX.device)
        aligned_1SM = self.vision_aligner(vision_features(self.vision_model, inputs))
        return SourceRows(
            timestep_M=self.timestep_emb(zero_B)[0],
            vae_SM=self.patch_embed(latents_BCYX, self.time_embed(zero_B))[0],
            vit_SM=aligned_1SM[0],
        )

    def prefill(self, prefills: Sequence[Prefill]) -> list[Tensor]:
        """Complete the buffers' prefixes in one forward; return each last row's state [M].

        `ids` are a layout's conditional or unconditional ids.
        """
        return self._prefilled(self.model, prefills)

    def prefill_branches(self, prefills: Sequence[Prefill]) -> None:
        """Prefill several branches in one forward, shared out over ranks if there are any."""
        if prefills:
            self._prefilled(self.model.branches, prefills)

    def _prefilled(
        self, forward: Callable[..., Tensor], prefills: Sequence[Prefill]
    ) -> list[Tensor]:
        buffers = [one.buffer for one in prefills]
        rows, ropes, spans = zip(*map(self._entering, prefills), strict=True)
        blocks = kept_blocks([*zip(buffers, spans, strict=True)])
        hidden_TM = forward(torch.cat(rows), torch.cat(ropes, dim=1), blocks)
        return commit_rows(buffers, blocks, hidden_TM)

    def _entering(self, prefill: Prefill) -> tuple[Tensor, Tensor, Sequence[QuerySpan]]:
        """Return the rows of a prefill, their positions, and their mask."""
        layout, ids, _, buffer, stop = prefill
        sources: Sequence[SourceRows] = prefill.sources
        start = buffer.length
        x_TM = embed(self.model.wte, ids[start:stop])
        for block, rows in zip(layout.sources, sources, strict=True):
            if start <= block.timestep and block.vit.stop <= stop:
                x_TM[block.timestep - start] = rows.timestep_M.to(x_TM)
                x_TM[block.vae.start - start : block.vae.stop - start] = rows.vae_SM.to(x_TM)
                x_TM[block.vit.start - start : block.vit.stop - start] = rows.vit_SM.to(x_TM)
        # The last token is a run of its own: its hidden row is needed even if all others are
        # shared.
        spans = query_spans(start, stop, layout.full_spans, (*layout.cuts, stop - 1))
        return x_TM, self._rope(layout, start, stop), spans

    def feed(self, runs: Sequence[tuple[Sequence[int] | Tensor, Buffer]]) -> Tensor:
        """Append text tokens to each buffer's prefix; return the last hidden rows, [R, M].

        All runs enter the transformer together, as a decode step of several rows. Runs of one
        buffer follow each other, with the bits of a step each. Ids on the device, int64 [T], stay
        there.
        """
        buffers = [buffer for _, buffer in runs]
        spans = appended_spans((buffer, len(ids)) for ids, buffer in runs)
        blocks = kept_blocks([(b, [span]) for b, span in zip(buffers, spans, strict=True)])
        embedded_TM = torch.cat([embed(self.model.wte, ids) for ids, _ in runs])
        places = [(span.start, span.stop) for span in spans]
        rope_2TD = self.angles.text(places, embedded_TM.device)
        hidden_TM = self.model(embedded_TM, rope_2TD, blocks)
        return torch.stack(commit_rows(buffers, blocks, hidden_TM))

    def text_logits(self, hidden_RM: Tensor) -> Tensor:
        """Next-token logits [R, V] in float32; only here does the final norm apply."""
        # In a model spread over devices, this is the norm's device, and its input is moved there.
        with current(self.model.ln_f.weight.device):
            logits: Tensor = self.lm_head(self.model.ln_f(self._padded(hidden_RM)))
        return logits[: hidden_RM.shape[0]].float()

    def branch(self, layout: Layout, buffer: Buffer) -> Branch:
        """Return a branch ready to denoise; its prefix is complete in `buffer`."""
        target = layout.target
        assert target is not None, "a branch has a picture to draw"
        start, stop = target.live_start, target.image.stop
        assert buffer.length == start, "the prefix is complete before denoising"
        spans = query_spans(start, stop, layout.full_spans)
        return Branch(target, self._rope(layout, start, stop), spans, buffer)

    def velocity(self, pictures: Sequence[DenoiseInput]) -> list[Tensor]:
        """Return every picture's branch velocities, [G, C, Y, X] each, float32, unguided.

        The pictures have one size. All their live rows enter the transformer together. The next
        timestep and the guidance scale are tokens of a distilled model only.
        """
        branches = [branch for live in pictures for branch in live.branches]
        owner = [number for number, live in enumerate(pictures) for _ in live.branches]
        target: TargetBlock = branches[0].target
        latents_CYX = pictures[0].latents_CYX
        rows_PTM = self._live_rows(pictures)
        hidden_TM = self.model.branches(
            torch.cat([rows_PTM[number] for number in owner]),
            torch.cat([branch.live_rope_2TD for branch in branches], dim=1),
            [branch.query_block for branch in branches],
        )
        # Back from the picture's own rows to latents.
        image_GSM = hidden_TM.unflatten(0, (len(branches), -1))[:, target.special_count :]
        embedding_PM = self.time_embed_2(self._scalars([live.step.timestep for live in pictures]))
        embedding_GM = torch.stack([embedding_PM[number] for number in owner])
        velocity_GCYX = self.final_layer(
            self._padded(image_GSM), self._padded(embedding_GM), latents_CYX.shape[1]
        )
        velocity_GCYX = velocity_GCYX[: len(owner)].to(latents_CYX.device).float()
        return list(velocity_GCYX.split([len(live.branches) for live in pictures]))

    def make_batch_invariant(self, multiple: int) -> None:
        """Make a row's bits independent of other rows from now on.

        Rows and pictures are padded to a multiple; convolutions around the transformer are
        products.
        """
        self.model.row_multiple = multiple
        for module in (*self.patch_embed.modules(), *self.final_layer.modules()):
            if isinstance(module, RowConv2d):
                module.by_rows = True

    @property
    def weight(self) -> Tensor:
        """Return a weight with the network's dtype and the device where tokens enter."""
        return self.model.wte.weight

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def layer_devices(self) -> list[torch.device]:
        """Return the device of each layer, and of its K/V."""
        return [layer.self_attn.qkv_proj.weight.device for layer in self.model.layers]

    def new_storage(self) -> Storage:
        """Return an empty storage, by layer on the layer's device."""
        return Storage(
            # The layer's own count: a sharded layer has some of the heads.
            kv_heads=self.model.layers[0].self_attn.kv_heads,
            head_dim=self.arch.head_dim,
            dtype=self.model.layers[0].self_attn.qkv_proj.weight.dtype,
            devices=self.layer_devices,
        )

    @cached_property
    def arena(self) -> Arena:
        """The K/V of all sequences, made once the weights are in place."""
        return Arena(self.new_storage(), page_rows(self.layer_devices[0]))

    def new_buffer(self, home: int | None = None) -> Buffer:
        """Return an empty buffer; `home`: the branch set that computes its rows."""
        return Buffer(self.arena, home)

    def _live_rows(self, pictures: Sequence[DenoiseInput]) -> Tensor:
        """Return the rows that change at every step, [P, T, M].

        The tokens before the picture's own (one, or three if distilled), then the picture's.
        """
        target = pictures[0].branches[0].target
        timestep_P = self._scalars([live.step.timestep for live in pictures])
        special_PM = [self.timestep_emb(timestep_P)]
        if target.guidance is not None:
            # Upstream passes the scale in bfloat16: 2500 becomes 2496.
            scale_P = self._scalars([1000.0 * live.guidance for live in pictures])
            special_PM.append(self.guidance_emb(scale_P.to(torch.bfloat16)))
        if target.timestep_r is not None:
            next_P = self._scalars([live.step.next_timestep for live in pictures])
            special_PM.append(self.timestep_r_emb(next_P))
        latents_PCYX = torch.stack([live.latents_CYX.to(self.device) for live in pictures])
        image_PSM = self.patch_embed(self._padded(latents_PCYX), self.time_embed(timestep_P))
        # A spread model's embedders may live on other devices than its first layer.
        special_PSM = torch.stack([row.to(image_PSM.device) for row in special_PM], dim=1)
        return torch.cat([special_PSM, image_PSM], dim=1)

    def _padded(self, x: Tensor) -> Tensor:
        return pad_rows(x, self.model.row_multiple)

    def _scalars(self, values: Sequence[float]) -> Tensor:
        """Return numbers on the device, padded like pictures; made there, because a copy would
        wait.
        """
        return self._padded(
            torch.cat([torch.full((1,), value, device=self.device) for value in values])
        )

    def _rope(self, layout: Layout, start: int, stop: int) -> Tensor:
        device = self.model.wte.weight.device
        return self.angles.rows(start, stop, layout.image_blocks, device)


class RowConv2d(nn.Conv2d):
    """A same-size convolution that can run as one matrix product over all cells of all pictures.

    A convolution kernel's bits depend on the number of pictures in its input; a product's do not
    (see `kernels/rows.py`). For small grids on a CPU, the product is also faster.
    """

    def __init__(self, channels_in: int, channels_out: int, kernel: int) -> None:
        super().__init__(channels_in, channels_out, kernel, padding=kernel // 2)
        self.by_rows = False

    def forward(self, x_BCYX: Tensor) -> Tensor:
        x_BCYX = x_BCYX.to(self.weight.dtype)
        if not self.by_rows:
            return super().forward(x_BCYX)
        kernel, padding = self.kernel_size[0], self.kernel_size[0] // 2
        windows_BLK = F.unfold(x_BCYX, kernel, padding=padding).transpose(1, 2)
        out_BLC = F.linear(windows_BLK, self.weight.flatten(1), self.bias)
        return out_BLC.transpose(1, 2).unflatten(2, x_BCYX.shape[2:])


class WideGroupNorm(nn.GroupNorm):
    """A group norm with float32 output in any dtype, as under upstream's autocast.

    What follows, up to the next convolution, is then rounded to 16 bits once.
    """

    def forward(self, x_BCYX: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.group_norm(x_BCYX.float(), self.num_groups, weight, bias, self.eps)


class ResBlock(nn.Module):
    """Two 3x3 convolutions, the second scaled and shifted by the timestep."""

    def __init__(self, channels_in: int, channels_out: int, embedding: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            WideGroupNorm(_NORM_GROUPS, channels_in),
            nn.SiLU(),
            RowConv2d(channels_in, channels_out, 3),
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embedding, 2 * channels_out))
        # Index 2 is upstream's dropout: it gives the convolution its stored name, out_layers.3.
        self.out_layers = nn.Sequential(
            WideGroupNorm(_NORM_GROUPS, channels_out),
            nn.SiLU(),
            nn.Identity(),
            RowConv2d(channels_out, channels_out, 3),
        )
        self.skip_connection = (
            nn.Identity()
            if channels_in == channels_out
            else RowConv2d(channels_in, channels_out, 1)
        )

    def forward(self, x_BCYX: Tensor, embedding_BM: Tensor) -> Tensor:
        h = self.in_layers(x_BCYX)
        scale, shift = self.emb_layers(embedding_BM)[..., None, None].chunk(2, dim=1)
        norm, activation, _, convolution = self.out_layers
        h = convolution(activation(norm(h) * (1 + scale) + shift))
        return self.skip_connection(x_BCYX) + h


class PatchEmbed(nn.Module):
    """Latents [B, C, Y, X] to image tokens [B, S, M], row by row."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        inner = arch.patch_embed_hidden_dim
        self.model = nn.ModuleList(
            [
                RowConv2d(arch.vae.latent_channels, inner, 3),
                ResBlock(inner, arch.hidden_size, arch.hidden_size),
            ]
        )

    def forward(self, latents_BCYX: Tensor, embedding_BM: Tensor) -> Tensor:
        convolution, block = self.model
        latents_BCYX = latents_BCYX.to(embedding_BM.dtype)
        return block(convolution(latents_BCYX), embedding_BM).flatten(2).transpose(1, 2)


class FinalLayer(nn.Module):
    """Image tokens [B, S, M] of the residual stream to velocity [B, C, Y, X]."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        inner = arch.patch_embed_hidden_dim
        head = nn.Sequential(
            WideGroupNorm(_NORM_GROUPS, inner),
            nn.SiLU(),
            RowConv2d(inner, arch.vae.latent_channels, 3),
        )
        self.model = nn.ModuleList([ResBlock(arch.hidden_size, inner, arch.hidden_size), head])

    def forward(self, tokens_BSM: Tensor, embedding_BM: Tensor, rows: int) -> Tensor:
        block, head = self.model
        x_BMYX = tokens_BSM.transpose(1, 2).unflatten(2, (rows, -1))
        return head(block(x_BMYX, embedding_BM))


class VisionAligner(nn.Module):
    """ViT features to model width: two linear layers with exact GELU in between."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        layers = nn.Linear(width_in, width), nn.GELU(), nn.Linear(width, width)
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)
