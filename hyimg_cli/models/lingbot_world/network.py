"""The transformer: Wan 2.2's, with a camera step in each block, over one K/V cache.

A chunk of latent frames is passed several times; each pass writes its K/V into the chunk's own
slots and reads all up to the chunk's end. No mask: causal is what the cache holds.

    once a request   text's K/V, times
    once a chunk     rope at its frames, the camera's scale and shift of every block
    each pass        the rest
"""

# Legend: B clips, C channel, F latent frames, Y X latent rows and columns, S tokens of a chunk,
# N text tokens, M width, H heads, D head width, T cached tokens; of a camera's rays H W pixels
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as fun
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn

from hyimg_cli.models.lingbot_world.layout import NetworkShape
from hyimg_cli.spec.job import Size

FOLD = 8
CHANNELS = 6 * FOLD * FOLD
Intrinsics = tuple[float, float, float, float]
_THETA = 10000.0
CAMERA_LAYERS = ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer")
# These stay in float32 in any dtype: what modulates every token, and norms with weights.
IN_FLOAT32 = ("time_embedder", "time_proj", "scale_shift_table", "norm2")


@dataclass
class Clip:
    """State shared by all passes of one or several requests: the cache and constants.

    `cache`: keys and values of every layer, [2, B, H, T, D].
    Of the request: `text`, `times` by number of the pass, `whole_rope`; of the chunk: `camera`.
    """

    cache: list[Tensor]
    text: list[tuple[Tensor, Tensor]]
    times: list[tuple[Tensor, Tensor]]
    whole_rope: tuple[Tensor, Tensor]
    camera: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class LingBotNetwork(nn.Module):
    """The network. Its modules have the names of diffusers' Wan; its forward is its own."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        numbers = {**asdict(shape), "rope_max_seq_len": 1}
        del numbers["text_len"], numbers["num_frames_per_block"]  # not a number of Wan's
        wan: Any = WanTransformer3DModel(**numbers)
        width = shape.width
        self.patch_embedding, self.condition_embedder = wan.patch_embedding, wan.condition_embedder
        self.patch_embedding_wancamctrl = nn.Linear(CHANNELS * math.prod(shape.patch_size), width)
        self.c2ws_hidden_states_layer1 = nn.Linear(width, width)
        self.c2ws_hidden_states_layer2 = nn.Linear(width, width)
        self.blocks: Any = wan.blocks
        for block in self.blocks:
            for name in CAMERA_LAYERS:
                block.add_module(name, nn.Linear(width, width))
        self.norm_out, self.proj_out = wan.norm_out, cast(nn.Linear, wan.proj_out)
        self.scale_shift_table = wan.scale_shift_table

    @property
    def dtype(self) -> torch.dtype:
        return self.proj_out.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.proj_out.weight.device

    def clip(
        self, text_BNM: Tensor, timesteps: Sequence[int], *, chunks: int, rows: int, columns: int
    ) -> Clip:
        """Make room for clips of `chunks` chunks, and compute what is constant in them.

        `text_BNM`: embeddings padded to all text positions; `timesteps`: of a chunk's passes, in
        order.
        """
        shape, batch = self.shape, len(text_BNM)
        _, patch_rows, patch_columns = shape.patch_size
        frames = chunks * shape.num_frames_per_block
        grid = (frames, rows // patch_rows, columns // patch_columns)
        held = (2, batch, shape.num_attention_heads, math.prod(grid), shape.attention_head_dim)
        cache = [self.proj_out.weight.new_empty(held) for _ in range(shape.num_layers)]
        cosines, sines = rope(grid, shape.attention_head_dim)
        times = [self.time(timestep) for timestep in timesteps]
        turn = cosines.to(self.device), sines.to(self.device)
        return Clip(cache, self.text(text_BNM), times, turn)

    def begin(self, clip: Clip, camera_BCFYX: Tensor) -> None:
        """Compute a chunk's constants: its camera's scale and shift [B, S, M] in every block."""
        embedded, clip.camera = self.camera_embedding(camera_BCFYX), []
        for block in self.blocks:
            inner = fun.silu(block.cam_injector_layer1(embedded))
            hidden = block.cam_injector_layer2(inner) + embedded
            clip.camera.append((block.cam_scale_layer(hidden), block.cam_shift_layer(hidden)))

    def text(self, text_BNM: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the text's K/V in every block, [B, H, N, D]."""
        embedded = self.condition_embedder.text_embedder(text_BNM.to(self.device, self.dtype))
        return [
            (
                self._heads(block.attn2.norm_k(block.attn2.to_k(embedded))),
                self._heads(block.attn2.to_v(embedded)),
            )
            for block in self.blocks
        ]

    def time(self, timestep: int) -> tuple[Tensor, Tensor]:
        """Return a timestep's embedding [1, M] and its six modulations [1, 6, M], in float32."""
        embedder = self.condition_embedder
        half = self.shape.freq_dim // 2
        angles = timestep * _THETA ** -(torch.arange(half, dtype=torch.float64) / half)
        waves_1W = torch.cat([angles.cos(), angles.sin()])[None].float()
        embedded = embedder.time_embedder(waves_1W.to(self.device))
        return embedded, embedder.time_proj(fun.silu(embedded)).unflatten(1, (6, -1))

    def camera_embedding(self, camera_BCFYX: Tensor) -> Tensor:
        """Return the tokens of a grid of rays, [B, S, M]."""
        patched = patches(camera_BCFYX, self.shape.patch_size).to(self.dtype)
        embedded: Tensor = self.patch_embedding_wancamctrl(patched)
        inner = fun.silu(self.c2ws_hidden_states_layer1(embedded))
        return embedded + self.c2ws_hidden_states_layer2(inner)

    def forward(self, clip: Clip, chunk: int, number: int, latents_BCFYX: Tensor) -> Tensor:
        """Return the velocity of a chunk at pass `number`, [B, C, F, Y, X].

        Reads nothing on the host. `latents_BCFYX`: noisy latents, mask channels, picture latents.
        """
        embedded_1M, modulation_16M = clip.times[number]
        patched: Tensor = self.patch_embedding(latents_BCFYX.to(self.dtype))
        hidden_BSM = patched.flatten(2).transpose(1, 2).contiguous()
        for layer in range(self.shape.num_layers):
            hidden_BSM = self.block(clip, layer, chunk, hidden_BSM, modulation_16M)
        shift, scale = (self.scale_shift_table + embedded_1M[:, None]).chunk(2, dim=1)
        normed = self.norm_out(hidden_BSM.float()) * (1 + scale) + shift
        rows_BSM: Tensor = self.proj_out(normed.to(self.dtype))
        # A patch's cells come before its channels: batch, channels, then (frame, in patch),
        # (row, in patch), (column, in patch).
        cells = rows_BSM.unflatten(2, (*self.shape.patch_size, -1)).unflatten(1, patched.shape[2:])
        return cells.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def block(
        self, clip: Clip, layer: int, chunk: int, hidden_BSM: Tensor, modulation_16M: Tensor
    ) -> Tensor:
        """Run a block: attention to the cache up to the chunk's end, camera, text, feed-forward."""
        block = self.blocks[layer]
        shift, scale, gate, ff_shift, ff_scale, ff_gate = (
            block.scale_shift_table + modulation_16M
        ).chunk(6, dim=1)
        normed = _modulated(block.norm1, hidden_BSM, scale, shift)
        hidden_BSM = _gated(hidden_BSM, self.attention(clip, layer, chunk, normed), gate)
        seen_scale, seen_shift = clip.camera[layer]
        hidden_BSM = (1 + seen_scale) * hidden_BSM + seen_shift
        # Attends to all text positions; the zeros after the text are not masked.
        normed = block.norm2(hidden_BSM.float()).to(self.dtype)
        query_BHSD = self._heads(block.attn2.norm_q(block.attn2.to_q(normed)))
        mixed = fun.scaled_dot_product_attention(query_BHSD, *clip.text[layer])
        hidden_BSM = hidden_BSM + self._joined(mixed, block.attn2)
        normed = _modulated(block.norm3, hidden_BSM, ff_scale, ff_shift)
        return _gated(hidden_BSM, block.ffn(normed), ff_gate)

    def attention(self, clip: Clip, layer: int, chunk: int, rows_BSM: Tensor) -> Tensor:
        """Write the chunk's rows to their slots, and attend to all slots up to their end."""
        module, tokens = self.blocks[layer].attn1, rows_BSM.shape[1]
        slots = slice(chunk * tokens, (chunk + 1) * tokens)
        cosines, sines = clip.whole_rope
        turn = cosines[slots], sines[slots]
        query_BHSD, key_BHSD = (
            rotated(self._heads(norm(project(rows_BSM))), turn)
            for norm, project in ((module.norm_q, module.to_q), (module.norm_k, module.to_k))
        )
        value_BHSD = self._heads(module.to_v(rows_BSM))
        for side, rows_BHSD in zip(clip.cache[layer], (key_BHSD, value_BHSD), strict=True):
            side[:, :, slots] = rows_BHSD
        keys, values = clip.cache[layer][:, :, :, : slots.stop]
        return self._joined(fun.scaled_dot_product_attention(query_BHSD, keys, values), module)

    def _heads(self, rows_BSM: Tensor) -> Tensor:
        heads: Tensor = rows_BSM.unflatten(2, (self.shape.num_attention_heads, -1)).transpose(1, 2)
        return heads

    def _joined(self, mixed_BHSD: Tensor, module: Any) -> Tensor:
        rows: Tensor = module.to_out[0](mixed_BHSD.transpose(1, 2).flatten(2))
        return rows


def rope(grid: tuple[int, int, int], head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [S, D / 2] of tokens in frame, row, column order, as in Wan."""
    table = WanRotaryPosEmbed(head_dim, (1, 1, 1), max(grid))
    # The library has each number twice, once for each of a pair.
    cosines, sines = (both[0, :, 0, ::2] for both in table(torch.empty(1, 1, *grid)))
    return cosines, sines


def rotated(x_BHSD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate neighbouring numbers of each head as pairs, in float32."""
    cosines, sines = angles
    left, right = x_BHSD.float().unflatten(3, (-1, 2)).unbind(-1)
    turned = (left * cosines - right * sines, left * sines + right * cosines)
    return torch.stack(turned, dim=-1).flatten(3).to(x_BHSD.dtype)


def plucker(poses_F44: Tensor, intrinsics: Intrinsics, size: Size) -> Tensor:
    """Return a camera path as the network reads it, folded onto the latent grid, [C, F, Y, X].

    Origin and unit direction of each pixel's ray, as seen from the frame before; no cross product.
    Channels are component, pixel row, pixel column.
    """
    fx, fy, cx, cy = intrinsics
    dtype, device = poses_F44.dtype, poses_F44.device
    x_W = (torch.arange(size.width, dtype=dtype, device=device) + 0.5 - cx) / fx
    y_H = (torch.arange(size.height, dtype=dtype, device=device) + 0.5 - cy) / fy
    y_HW, x_HW = torch.meshgrid(y_H, x_W, indexing="ij")
    seen_HW3 = torch.stack([x_HW, y_HW, torch.ones_like(x_HW)], dim=-1)
    seen_HW3 = seen_HW3 / seen_HW3.norm(dim=-1, keepdim=True)
    directions_FHW3 = torch.einsum("hwi,fji->fhwj", seen_HW3, poses_F44[:, :3, :3])
    origins_FHW3 = poses_F44[:, None, None, :3, 3].expand_as(directions_FHW3)
    of_pixels = torch.cat([origins_FHW3, directions_FHW3], dim=-1)
    folded: Tensor = of_pixels.unflatten(2, (-1, FOLD)).unflatten(1, (-1, FOLD))
    # frames, latent rows, pixel rows, latent columns, pixel columns, components
    return folded.permute(5, 2, 4, 0, 1, 3).flatten(0, 2)


def patches(grid_BCFYX: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Return tokens [B, S, C times a patch's cells] of a grid, in a convolution's weight order."""
    across: Tensor = grid_BCFYX.unflatten(4, (-1, patch[2])).unflatten(3, (-1, patch[1]))
    split: Tensor = across.unflatten(2, (-1, patch[0]))
    # batch, channels, then (frame, in patch), (row, in patch), (column, in patch)
    return split.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def _modulated(norm: Any, hidden_BSM: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    normed: Tensor = norm(hidden_BSM.float()) * (1 + scale) + shift
    return normed.to(hidden_BSM.dtype)


def _gated(hidden_BSM: Tensor, added_BSM: Tensor, gate: Tensor) -> Tensor:
    return (hidden_BSM.float() + added_BSM.float() * gate).to(hidden_BSM.dtype)
