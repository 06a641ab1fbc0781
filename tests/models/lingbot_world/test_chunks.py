"""Chunks over one cache: against a forward of the whole clip under a mask, and what each pass does
to those that come.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as fun
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hyimg_cli.models.lingbot_world import poses
from hyimg_cli.models.lingbot_world.denoising import ChunkDenoiser, ClipInputs, drawn
from hyimg_cli.models.lingbot_world.model import LingBotWorld
from hyimg_cli.models.lingbot_world.network import LingBotNetwork, plucker, rope, rotated
from hyimg_cli.models.lingbot_world.schedule import levels
from hyimg_cli.spec.job import Size

from .conftest import passes, run

GRID, SIZE, CHUNKS = (9, 4, 6), Size(32, 48), 3
LEVELS = levels(10.0)
WITH_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def clip_of(seed: int, text_seed: int = 0) -> ClipInputs:
    """A clip of three chunks with a path and conditions of its own."""
    path = poses.key_poses("wl-9,di-9,aj-15")[:33]
    generator = torch.Generator().manual_seed(100 + text_seed)
    text = torch.zeros(40, 32)
    text[: 9 + text_seed] = torch.randn(9 + text_seed, 32, generator=generator)
    return ClipInputs(
        *drawn(seed, (16, *GRID), 3, len(LEVELS)),
        torch.randn(20, *GRID, generator=generator),
        text,
        torch.from_numpy(poses.CameraPath(path, poses.KEY_INTRINSICS).at(GRID[0])).float(),
        (30.0, 28.0, 25.0, 15.0),
    )


def denoiser_of(model: LingBotWorld, clips: Sequence[ClipInputs]) -> ChunkDenoiser:
    return ChunkDenoiser(model.networks[0], clips, LEVELS, SIZE)


def frames_of(chunk: int) -> slice:
    return slice(3 * chunk, 3 * chunk + 3)


@torch.no_grad()
def whole_forward(network: LingBotNetwork, clip: ClipInputs, latents: Tensor, at: int) -> Tensor:
    """The velocity of all frames in one forward without a cache: earlier chunks are clean, the last
    at timestep `at`; a token sees its chunk and those before it. Written apart from the network's.
    """
    shape, count = network.shape, latents.shape[2]
    tokens = count * 6
    chunk_S = torch.arange(tokens) // 18
    mask_SS = chunk_S[:, None] >= chunk_S
    times = [network.time(at if chunk == count // 3 - 1 else 0) for chunk in range(count // 3)]
    embedded_SM = torch.cat([embedded.expand(18, -1) for embedded, _ in times])
    modulation_S6M = torch.cat([modulation.expand(18, -1, -1) for _, modulation in times])
    angles = rope((count, 2, 3), shape.attention_head_dim)
    taken = torch.cat([latents[0], clip.condition_CFYX[:, :count]])[None]
    hidden = network.patch_embedding(taken).flatten(2).transpose(1, 2)
    text = network.condition_embedder.text_embedder(clip.text_NM[None])
    grid = plucker(clip.poses_F44[:count], clip.intrinsics, SIZE)
    seen = network.camera_embedding(grid[None])

    def heads(rows: Tensor) -> Tensor:
        return rows.view(1, -1, shape.num_attention_heads, shape.attention_head_dim).transpose(1, 2)

    def attended(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.transpose(2, 3) / shape.attention_head_dim**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return module.to_out[0](mixed)

    for block in network.blocks:
        table = block.scale_shift_table + modulation_S6M
        shift, scale, gate, ff_shift, ff_scale, ff_gate = table.unbind(1)
        rows = fun.layer_norm(hidden, (shape.width,), eps=shape.eps) * (1 + scale) + shift
        own, cross = block.attn1, block.attn2
        q, k = heads(own.norm_q(own.to_q(rows))), heads(own.norm_k(own.to_k(rows)))
        mixed = attended(
            own, rotated(q, angles), rotated(k, angles), heads(own.to_v(rows)), mask_SS
        )
        hidden = hidden + mixed * gate
        way = block.cam_injector_layer2(fun.silu(block.cam_injector_layer1(seen))) + seen
        hidden = (1 + block.cam_scale_layer(way)) * hidden + block.cam_shift_layer(way)
        rows = block.norm2(hidden)
        k, v = heads(cross.norm_k(cross.to_k(text))), heads(cross.to_v(text))
        hidden = hidden + attended(cross, heads(cross.norm_q(cross.to_q(rows))), k, v, None)
        rows = fun.layer_norm(hidden, (shape.width,), eps=shape.eps) * (1 + ff_scale) + ff_shift
        hidden = hidden + block.ffn(rows) * ff_gate
    shift, scale = (network.scale_shift_table + embedded_SM[:, None]).unbind(1)
    rows = fun.layer_norm(hidden, (shape.width,), eps=shape.eps) * (1 + scale) + shift
    cells = network.proj_out(rows).view(count, 2, 3, 2, 2, shape.out_channels)
    return cells.permute(5, 0, 1, 3, 2, 4).reshape(1, shape.out_channels, count, 4, 6)


def test_every_pass_equals_a_masked_forward_of_the_clip_so_far(golden: LingBotWorld) -> None:
    """Each step of chunks 0, 1 and 2 is made again from the oracle's velocity."""
    clip = clip_of(5)
    denoiser = denoiser_of(golden, [clip])
    latents = denoiser.latents
    for index in range(denoiser.steps):
        chunk, number = divmod(index, 5)
        moved = denoiser.step(index, latents)
        if number < 4:
            stop = 3 * chunk + 3
            level, last = LEVELS[number], frames_of(chunk)
            velocity = whole_forward(golden.networks[0], clip, latents[:, :, :stop], level.timestep)
            clean = latents[:, :, last] - level.sigma * velocity[:, :, last]
            if number < 3:
                level, new = LEVELS[number + 1], clip.renoise_KLCFYX[chunk, number]
                clean = level.keep * clean + level.renoise * new
            assert torch.allclose(moved[:, :, last], clean, atol=1e-5)
        latents = moved


def test_chunks_know_those_before_them_and_none_behind(golden: LingBotWorld) -> None:
    plain = run(denoiser_of(golden, [clip_of(5)]))
    for changed in range(CHUNKS):
        denoiser = denoiser_of(golden, [clip_of(5)])
        latents = denoiser.latents
        latents[:, :, frames_of(changed)] += 1
        found = run(denoiser, latents)
        for chunk in range(CHUNKS):
            same = torch.equal(found[:, :, frames_of(chunk)], plain[:, :, frames_of(chunk)])
            assert same == (chunk < changed)


def test_a_clean_pass_is_for_the_chunks_behind_it(golden: LingBotWorld) -> None:
    plain = run(denoiser_of(golden, [clip_of(5)]))
    denoiser = denoiser_of(golden, [clip_of(5)])
    latents = denoiser.latents
    for index in range(denoiser.steps):
        if index == 4:
            denoiser._filled = 1  # chunk 0 leaves the K/V of its fourth step
            continue
        latents = denoiser.step(index, latents)
    assert torch.equal(latents[:, :, frames_of(0)], plain[:, :, frames_of(0)])
    assert not torch.equal(latents[:, :, frames_of(1)], plain[:, :, frames_of(1)])
    # One of the last chunk changes nothing that is kept.
    assert torch.equal(denoiser_of(golden, [clip_of(5)]).step(14, plain), plain)
    assert denoiser.steps == CHUNKS * 5 - 1


def test_a_clip_goes_on_from_any_step_by_its_latents_alone(golden: LingBotWorld) -> None:
    first = denoiser_of(golden, [clip_of(5)])
    latents = [first.latents]
    with passes(golden.networks[0]) as made:
        for index in range(first.steps):
            latents.append(first.step(index, latents[-1]))
    assert len(made) == 5 * CHUNKS - 1, "five a chunk, but for the last clean one"
    for index in (1, 4, 5, 8, 10, 13):
        second = denoiser_of(golden, [clip_of(5)])
        second.restore(index, latents[index], first.state())
        with passes(golden.networks[0]) as made:
            assert torch.equal(run(second, latents[index], index), latents[-1])
        # One clean pass for each chunk that is finished, where it is not among the steps left.
        assert len(made) == first.steps - index + index // 5
    assert [step for step in range(1, 15) if first.is_stop(step)] == [5, 10]


def test_another_clip_on_the_same_network_sees_nothing_of_the_first(golden: LingBotWorld) -> None:
    before = run(denoiser_of(golden, [clip_of(6, 3)]))
    run(denoiser_of(golden, [clip_of(5)]))
    assert torch.equal(run(denoiser_of(golden, [clip_of(6, 3)])), before)


def test_a_chunks_camera_is_computed_once_to_the_same_bits(golden: LingBotWorld) -> None:
    runs, network = 0, golden.networks[0]
    computed = network.camera_embedding

    def camera(grid: Tensor) -> Any:
        nonlocal runs
        runs += 1
        return computed(grid)

    network.camera_embedding = camera  # type: ignore[method-assign]
    hoisted = run(denoiser_of(golden, [clip_of(5)]))
    assert runs == CHUNKS
    each = denoiser_of(golden, [clip_of(5)])
    latents = each.latents
    for index in range(each.steps):
        each._begun = -1
        latents = each.step(index, latents)
    del network.camera_embedding
    assert runs == CHUNKS + CHUNKS * 5 - 1
    assert torch.equal(hoisted, latents)


class HostReads(TorchDispatchMode):
    """Counts what waits for a device: a tensor's value that is read by the program."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_on_the_host_in_the_loop(golden: LingBotWorld) -> None:
    before = torch.random.get_rng_state()
    denoiser = denoiser_of(golden, [clip_of(5)])
    with HostReads() as reads:
        run(denoiser)
        assert reads.count == 0
        # Chance is each clip's own: a prewarm leaves the program's as it was.
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.ones(1).item()
    assert reads.count == 1


@pytest.mark.gpu
@WITH_GPU
def test_no_step_waits_for_the_gpu(golden: LingBotWorld) -> None:
    network = golden.networks[0].to("cuda")
    try:
        denoiser = ChunkDenoiser(network, [clip_of(5)], LEVELS, SIZE)
        latents = denoiser.latents
        torch.cuda.set_sync_debug_mode("error")
        for index in range(denoiser.steps):
            latents = denoiser.step(index, latents)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        network.to("cpu")
    assert torch.isfinite(latents).all()


def test_frames_streamed_are_those_of_the_library_and_of_any_prefix(golden: LingBotWorld) -> None:
    latents = torch.randn(1, 16, 6, 4, 6)
    pieces = list(golden.decode_latents(latents))
    streamed = np.concatenate(pieces)
    assert len(streamed) == 21
    assert len(pieces) == 6
    with torch.no_grad():
        vae = golden.vae
        pixels = vae.module.decode(vae.unscaled(latents), return_dict=False)[0]
        stock = ((pixels[0] * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    assert np.array_equal(streamed, stock.permute(1, 2, 3, 0).numpy())
    prefix = np.concatenate(list(golden.decode_latents(latents[:, :, :3])))
    assert np.array_equal(prefix, streamed[:9])


def test_a_short_memory_takes_the_transformer_away_and_cuts_the_decode(
    golden: LingBotWorld,
) -> None:
    """It comes back for the next clip, with the same bits; tiles cut what one of them does not
    hold.
    """
    before = run(denoiser_of(golden, [clip_of(5)]))
    golden.unload_transformer()
    assert torch.equal(run(denoiser_of(golden, [clip_of(5)])), before)
    assert list(golden.smaller_tilings(torch.zeros(1, 16, 3, 4, 6))) == []
    ((word, tiling), (smaller, _)) = golden.smaller_tilings(torch.zeros(1, 16, 3, 40, 60))
    assert (word, smaller) == ("own", "half")
    pieces = np.concatenate(list(golden.decode_latents(torch.randn(1, 16, 1, 34, 4), tiling)))
    assert pieces.shape == (1, 272, 32, 3)
