"""The network against numbers of the published code, and exact reuse in float64."""

import copy
from typing import Any

import pytest
import torch
from kv_rows import read
from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.diffusion.schedule import Schedule, Step
from hyimg_cli.kernels.ops import rotate
from hyimg_cli.models.bagel.decoder import HeadNorm, NewTokens, rope
from hyimg_cli.models.bagel.family import Bagel, _levels, _patches
from hyimg_cli.models.bagel.guidance import Guidance, packed, unpacked
from hyimg_cli.models.bagel.network import BagelNetwork, ImageRows
from hyimg_cli.models.bagel.sequence import (
    BlockLayout,
    Markers,
    SourcePlace,
    contexts,
)
from hyimg_cli.models.common.attention import kept_blocks
from hyimg_cli.models.common.layers import RMSNorm, sinusoid
from hyimg_cli.models.common.spans import Grid, QuerySpan
from hyimg_cli.models.protocols import Context, DenoiseInput, Prefill
from hyimg_cli.spec.job import Size

from .conftest import CASES

MARKERS = Markers(398, 399, 400, 401)
SHAPE = SourcePlace(Size(64, 48), Size(64, 48), Size(42, 28), Grid(3, 2))
TEXT = (64, 366, 301)
STEP = Step(0, 0.6, 0.5, 600.0, 500.0, -0.1)
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def wide(loaded: Bagel) -> BagelNetwork:
    """The network in float64."""
    network = copy.deepcopy(loaded.network).double()
    vars(network).pop("arena", None)  # its rows have the dtype of the weights
    return network


@pytest.fixture(scope="module")
def source() -> ImageRows:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(n, 64, generator=generator, dtype=torch.float64) for n in (12, 6)]
    return ImageRows(*rows)


@pytest.fixture(scope="module")
def edit() -> Any:
    return contexts(MARKERS, [SHAPE, TEXT])


def _noise(kind: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(16, 4, 6, generator=torch.Generator().manual_seed(6), dtype=kind)


def _live(branches: list[Any], noise: Tensor) -> DenoiseInput:
    return DenoiseInput(noise, STEP, 4.0, branches)


@pytest.mark.parametrize("kind", ["gen", "und"])
def test_a_layer(loaded: Bagel, golden: dict[str, Tensor], kind: str) -> None:
    """Nine cached tokens and ten new ones: an image block, of which only the markers are und."""
    buffer = loaded.network.new_buffer()
    buffer.reserve(9)
    past = golden["layer.past_keys"], golden["layer.past_values"]
    buffer.arena.storage.write(1, buffer.span(0, 9), *past)
    buffer.commit(9)
    is_gen = [kind == "gen" and 0 < n < 9 for n in range(10)]
    positions = [7] * 10 if kind == "gen" else list(range(7, 17))
    (kept,) = kept_blocks([(buffer, [QuerySpan(9, 19, kind == "und")])])
    block = NewTokens(kept, positions, is_gen)
    decoder = loaded.network.decoder
    rows = decoder.rows([block], torch.device("cpu"))
    parts = rows.from_tokens(golden[f"layer.{kind}.input"])
    stream, more = (rows.to_tokens(each) for each in decoder.layers[1](parts, None, rows))
    out = stream + more
    torch.testing.assert_close(out, golden[f"layer.{kind}.output"], **CLOSE)
    if kind == "gen":
        keys = read(buffer, 1, 19)[0].transpose(0, 1)
        torch.testing.assert_close(keys, golden["layer.gen.keys"], **CLOSE)


def test_every_norm_rounds_as_the_published_one(loaded: Bagel) -> None:
    """In bfloat16: to the rows' dtype before the weight, and after it; a sum is rounded first."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    norms = [part for part in loaded.network.decoder.modules() if isinstance(part, RMSNorm)]
    assert len(norms) == 2 + 4 * len(loaded.network.decoder.layers)
    for ours in copy.deepcopy([norms[0], norms[-1]]):
        ours.bfloat16()
        width = len(ours.weight)
        published = Qwen2RMSNorm(width, ours.eps).bfloat16()
        published.load_state_dict(ours.state_dict())
        x, more = torch.randn(2, 9, width).bfloat16()
        expected = published(x + more)
        assert torch.equal(ours.added(x, more)[1], expected)
        assert torch.equal(ours(x + more), expected)
    head = copy.deepcopy(loaded.network.decoder.layers[0].self_attn.q_norm).bfloat16()
    published = Qwen2RMSNorm(16, head.eps).bfloat16()
    published.load_state_dict(head.state_dict())
    x, turn = torch.randn(9, 64).bfloat16(), rope(torch.arange(9), 16, 1e6)
    expected = rotate(published(x.unflatten(-1, (-1, 16))), *turn).bfloat16()
    assert torch.equal(head(x, turn), expected)


def test_the_vit(loaded: Bagel, golden: dict[str, Tensor]) -> None:
    """Patch order, rows of the position table, every layer, the norm behind them, the connector:
    a defect in any of them is 0.1 and more.
    """
    from hyimg_cli.media.images import bicubic

    grid = Grid(8, 6)
    patches = _patches(_levels(bicubic(golden["vit.rgb"].numpy(), Size(112, 84))), grid)
    torch.testing.assert_close(patches[:2], golden["vit.patches"])
    network = loaded.network
    seen = network.connector(network.vit_model.vision_model(patches, grid))
    torch.testing.assert_close(seen + network.vit_pos_embed(grid), golden["vit.tokens"], **CLOSE)


def test_one_hot_channel_tells_the_patch_order(loaded: Bagel) -> None:
    """Row in the patch, column in it, channel the fastest: of pictures and of latents."""
    levels = torch.zeros(3, 28, 42)
    levels[2, 14 + 5, 28 + 7] = 1
    assert _patches(levels, Grid(2, 3)).nonzero().tolist() == [[5, (5 * 14 + 7) * 3 + 2]]
    latents = torch.zeros(16, 4, 6)
    latents[9, 2 + 1, 4] = 1
    assert packed(latents).nonzero().tolist() == [[5, (1 * 2 + 0) * 16 + 9]]
    assert torch.equal(unpacked(packed(latents), 2, 3), latents)


def test_latent_tokens(loaded: Bagel, golden: dict[str, Tensor]) -> None:
    """A noise level is told as it is, not times 1000; the markers around are plain tokens."""
    network, latents = loaded.network, golden["latent.latent_chw"]
    torch.testing.assert_close(packed(latents), golden["latent.packed"])
    rows = network.latent_rows(latents, 0.6)
    ends = network.decoder.embed_tokens(torch.tensor([400, 401]))
    block = torch.cat([ends[:1], rows, ends[1:]])
    torch.testing.assert_close(block, golden["latent.block_t0.6"], **CLOSE)


def test_noise_levels(loaded: Bagel, golden: dict[str, Tensor]) -> None:
    """N levels are N - 1 steps, shifted; guidance is on within an interval of the shifted ones."""
    torch.testing.assert_close(sinusoid(golden["time.t"]), golden["time.sinusoid"])
    rows = loaded.network.time_embedder(golden["time.t"])
    torch.testing.assert_close(rows, golden["time.embedding"], **CLOSE)
    for one in CASES["time"]:
        count, shift = one["num_timesteps"], one["shift"]
        name = f"{count}_{shift}"
        schedule = Schedule(count - 1, shift)
        torch.testing.assert_close(schedule.sigmas(), golden[f"time.sigmas.{name}"])
        steps = schedule.steps()
        assert len(steps) == one["evaluations"]
        moves = torch.tensor([-step.difference for step in steps])
        torch.testing.assert_close(moves, golden[f"time.steps.{name}"])
        for interval, guided in one["guided"].items():
            low, high = map(float, interval.strip("[]").split(","))
            guidance = Guidance(4.0, 1.5, "global", (low, high), 1, None)
            assert [step.index for step in steps if guidance.is_active(step)] == guided


def _one_forward(
    network: BagelNetwork, layout: BlockLayout, source: ImageRows, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Everything at once under one mask, without any buffer: hidden rows, and the velocity."""
    x = network.decoder.embed_tokens(torch.tensor([max(0, id_) for id_ in layout.ids]))
    is_gen = torch.zeros(layout.length, dtype=torch.bool)
    mask = torch.ones(layout.length, layout.length).tril().bool()
    live = {"vae": source.vae_NM, "vit": source.vit_NM, "noise": network.latent_rows(noise, 0.6)}
    for block in layout.blocks:
        if block.kind == "text":
            continue
        if block.kind == "noise":
            ends = network.decoder.embed_tokens(torch.tensor([400, 401]))
            x[block.start], x[block.stop - 1] = ends
        x[block.start + 1 : block.stop - 1] = live[block.kind]
        is_gen[block.start + 1 : block.stop - 1] = block.kind != "vit"
        mask[block.start : block.stop, block.start : block.stop] = True
    cos, sin = rope(torch.tensor(layout.positions(0, layout.length)), 16, 1e6)

    def part(module: Any, name: str, rows: Tensor) -> Tensor:
        und, gen = module._modules[name], module._modules[f"{name}_moe_gen"]
        shape = (-1,) + (1,) * (rows.dim() - 1)
        return torch.where(is_gen.view(shape), run(gen, rows), run(und, rows))

    def run(module: Any, rows: Tensor) -> Tensor:
        if not isinstance(module, RMSNorm | HeadNorm):
            return module(rows)
        return F.rms_norm(rows, module.weight.shape, module.weight, module.eps)

    for layer in network.decoder.layers:
        own = layer.self_attn
        normed = part(layer, "input_layernorm", x)
        q, k, v = (part(own, f"{n}_proj", normed).unflatten(-1, (-1, 16)) for n in "qkv")
        q, k = rotate(part(own, "q_norm", q), cos, sin), rotate(part(own, "k_norm", k), cos, sin)
        k, v = (rows.repeat_interleave(2, dim=1) for rows in (k, v))
        seen = F.scaled_dot_product_attention(
            *(rows.transpose(0, 1)[None] for rows in (q, k, v)), attn_mask=mask
        )[0].transpose(0, 1)
        x = x + part(own, "o_proj", seen.flatten(1))
        x = x + part(layer, "mlp", part(layer, "post_attention_layernorm", x))
    hidden = part(network.decoder, "norm", x)
    rows = network.llm2vae(hidden[-Grid(2, 3).cells - 1 : -1])
    return hidden, unpacked(rows, 2, 3)


def _filled(network: BagelNetwork, layout: BlockLayout, source: ImageRows) -> Any:
    """The noise branch behind a context that was prefilled block by block."""
    *blocks, noise = layout.blocks
    context = BlockLayout(MARKERS, layout.ids[: noise.start], tuple(blocks))
    buffer = network.new_buffer()
    for block in context.blocks:
        network.prefill([Prefill(context, context.ids, [source], buffer, block.stop)])
    return network.branch(layout, buffer)


@torch.no_grad()
def test_block_by_block_is_one_masked_forward(
    wide: BagelNetwork, source: ImageRows, edit: Any
) -> None:
    layout, noise = edit.full.noise(Grid(2, 3)), _noise()
    branch = _filled(wide, layout, source)
    (velocity,) = wide.velocities([_live([branch], noise)], (400, 401))
    _, expected = _one_forward(wide, layout, source, noise)
    torch.testing.assert_close(velocity[0], expected.float(), atol=1e-6, rtol=1e-6)
    keys = read(branch.buffer, 2, edit.full.length)[0].clone()
    again = wide.new_buffer()
    wide.prefill([Prefill(edit.full, edit.full.ids, [source], again, edit.full.length)])
    torch.testing.assert_close(keys, read(again, 2, edit.full.length)[0], atol=1e-10, rtol=0)
    # In float64 all the way: the last state of a text behind everything.
    longer = edit.full.opening()
    buffer = wide.new_buffer()
    state = wide.prefill([Prefill(longer, longer.ids, [source], buffer, longer.length)])[0]
    whole = longer.noise(Grid(2, 3))
    hidden, _ = _one_forward(wide, whole, source, noise)
    torch.testing.assert_close(state, hidden[longer.length - 1], atol=1e-10, rtol=0)


@torch.no_grad()
def test_the_context_does_not_see_the_noise(
    wide: BagelNetwork, source: ImageRows, edit: Any
) -> None:
    layout = edit.full.noise(Grid(2, 3))
    branch = _filled(wide, layout, source)
    before = read(branch.buffer, 2, edit.full.length)[0].clone()
    first = wide.velocities([_live([branch], _noise())], (400, 401))[0]
    second = wide.velocities([_live([branch], _noise() + 1)], (400, 401))[0]
    assert torch.equal(read(branch.buffer, 2, edit.full.length)[0], before)
    assert not torch.equal(first, second)
    assert torch.equal(first, wide.velocities([_live([branch], _noise())], (400, 401))[0])


@torch.no_grad()
def test_a_prefix_is_the_context_without_the_text(
    wide: BagelNetwork, source: ImageRows, edit: Any
) -> None:
    full = _filled(wide, edit.full.noise(Grid(2, 3)), source)
    layout = edit.without_text.noise(Grid(2, 3))
    buffer = wide.new_buffer()
    buffer.share_prefix(full.buffer, edit.without_text.length)
    view = wide.branch(layout, buffer)
    own = _filled(wide, layout, source)
    both = wide.velocities([_live([view, own], _noise())], (400, 401))[0]
    assert torch.equal(both[0], both[1])


@torch.no_grad()
@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_layer_has_two_sets(
    wide: BagelNetwork, source: ImageRows, edit: Any, place: int
) -> None:
    layout = edit.full.noise(Grid(2, 3))
    expected = wide.velocities([_live([_filled(wide, layout, source)], _noise())], (400, 401))
    other = copy.deepcopy(wide)
    own = other.decoder.layers[place]._modules
    own["mlp"], own["mlp_moe_gen"] = own["mlp_moe_gen"], own["mlp"]
    found = other.velocities([_live([_filled(other, layout, source)], _noise())], (400, 401))
    assert (found[0] - expected[0]).abs().max() > 1e-3


@torch.no_grad()
def test_markers_are_no_latents(wide: BagelNetwork, source: ImageRows, edit: Any) -> None:
    branch = _filled(wide, edit.full.noise(Grid(2, 3)), source)
    assert list(branch.is_gen) == [False, *[True] * 6, False]
    expected = wide.velocities([_live([branch], _noise())], (400, 401))[0]
    object.__setattr__(branch, "is_gen", [True] * 8)
    found = wide.velocities([_live([branch], _noise())], (400, 401))[0]
    assert (found - expected).abs().max() > 1e-3


@torch.no_grad()
def test_rows_do_not_depend_on_their_company(loaded: Bagel) -> None:
    """To the bit, on the CPU in float32: a text beside others, a picture beside others."""
    network = loaded.network
    assert network.decoder.row_multiple > 1

    def fed(texts: list[tuple[int, ...]]) -> list[Tensor]:
        found = []
        for ids in texts:
            layout = BlockLayout(MARKERS).text(ids).opening()
            buffer = network.new_buffer()
            network.prefill([Prefill(layout, layout.ids, [], buffer, layout.length)])
            found.append(Context(list(layout.ids), buffer, None, layout))
        return network.feed([(one, [5]) for one in found])

    texts = [(1, 2, 3), tuple(range(17)), (9,), (7, 7)]
    alone = [fed([ids])[0] for ids in texts]
    assert all(torch.equal(a, b) for a, b in zip(fed(texts), alone, strict=True))
    layouts = [BlockLayout(MARKERS).text(ids).noise(Grid(2, 3)) for ids in texts]
    branches = [
        _filled(network, layout, ImageRows(*[torch.zeros(0, 64)] * 2)) for layout in layouts
    ]
    lives = [_live([branch], _noise(torch.float32) + n) for n, branch in enumerate(branches)]
    together = network.velocities(lives, (400, 401))
    for live, found in zip(lives, together, strict=True):
        assert torch.equal(found, network.velocities([live], (400, 401))[0])
