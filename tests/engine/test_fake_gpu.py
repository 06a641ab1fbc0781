"""The GPU's path at the released shapes without a GPU: devices, host reads, and bytes by count."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fake_gpu.bench import SIZE, Bench
from fake_gpu.device import fake_gpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyimg_cli.kernels import choice
from hyimg_cli.kernels.experts import RoutedTokens
from hyimg_cli.kernels.offloaded_experts import OffloadedExperts
from hyimg_cli.memory import footprint
from hyimg_cli.memory.footprint import Together, needs, working
from hyimg_cli.models.hunyuan_image3 import card, row_chunks
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.models.hunyuan_image3.vae import Vae
from hyimg_cli.models.protocols import Prefill
from hyimg_cli.pipelines.image.sampling import Draw, choose
from hyimg_cli.settings.run import MachineInfo

pytest.importorskip("triton", reason="what runs on a GPU is written in Triton")
# Layers are alike: what a forward works with is that of one, weights and K/V grow by each.
LAYERS = 2


@pytest.fixture(scope="module", params=["fp8", pytest.param("dense", marks=pytest.mark.thorough)])
def bench(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with fake_gpu() as gpu:
        yield Bench(gpu, tmp_path_factory.mktemp(request.param), request.param, LAYERS)
        gc.collect()


def test_weights_are_counted_to_the_byte(bench: Any) -> None:
    weights = bench.weights()
    assert weights.planned == weights.counted


@pytest.mark.thorough
def test_what_a_forward_works_with_is_what_the_plan_says(bench: Any) -> None:
    """Within a tenth above what is counted."""
    rows = list(bench.forwards())
    assert len(rows) == 7
    for row in rows:
        assert 1.0 <= row.ratio <= 1.1, row


@pytest.mark.parametrize("bench", ["fp8"], indirect=True)  # a format of experts alone
@pytest.mark.parametrize("frames", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_vae_holds_what_its_card_says(bench: Any, frames: int) -> None:
    """Other networks than the released one, in many chunks."""
    arch = replace(
        bench.load.arch.vae,
        block_out_channels=(32, 64, 64, 64, 64),
        ffactor_temporal=frames,
    )
    size, peaks = (768, 512), []
    with torch.device("cuda:0"), patch.object(row_chunks, "VAE_CHUNK_BYTES", 1 << 24):
        vae = Vae(arch)
        for call, shape in (
            (vae.encode_moments, (1, 3, *size)),
            (vae.decode, (1, arch.latent_channels, size[0] // 16, size[1] // 16)),
        ):
            given = torch.zeros(shape)
            base = bench.gpu.rebase()
            call(given)
            peaks.append(bench.gpu.peak - base)
    widest = card._vae_bytes(arch)
    facts = replace(bench.card, vae_bytes_per_pixel=widest, vae_chunk_bytes=1 << 24)
    planned = facts.vae_bytes(size[0] * size[1], "cuda")
    assert 1.0 <= planned / max(peaks) <= 1.1, (planned, peaks)


@pytest.mark.parametrize("by_graphs", [False, True])
def test_a_decode_step_takes_little(bench: Any, by_graphs: bool) -> None:
    assert bench.decode_step(16, by_graphs=by_graphs) < 10**8


@pytest.mark.parametrize(
    ("together", "has_vae"),
    [
        ((4, 1), False),
        pytest.param((3, 2), False, marks=pytest.mark.thorough),
        pytest.param((3, 1), True, marks=pytest.mark.thorough),
    ],
)
def test_a_run_holds_what_the_plan_says(
    bench: Any, together: tuple[int, int], has_vae: bool
) -> None:
    """Whole requests through the engine's own loop: weights, K/V and activations. With so few
    layers the VAE is the widest moment, so that drawing is looked at without it.
    """
    counted = bench.requests(4, Together(*together), has_vae=has_vae)
    assert 1.0 <= counted.ratio < 1.1, counted


def test_no_step_reads_from_the_gpu_or_waits_for_it(bench: Any) -> None:
    """Nothing but what is named, and that once a job; in the loops nothing at all."""
    gpu = bench.gpu
    gpu.reads.clear(), gpu.waits.clear()
    picture = bench._picture()
    bench.network.velocity([picture, picture])
    for count in (1, 16):
        bench.decode_step(count)
        bench.decode_step(count, by_graphs=True)
    layout = bench.load.layout
    buffer = bench.network.new_buffer()
    bench.network.prefill(
        [Prefill(layout, layout.ids, [bench._source()], buffer, layout.live_start)]
    )
    assert not gpu.reads
    assert not gpu.waits


class _Refused(TorchDispatchMode):
    """Notes what torch has no deterministic way for on a GPU, of operations that are not
    differentiated: its own list at `use_deterministic_algorithms`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = op.overloadpacket.__name__, next(iter(args), None)
        if isinstance(first, Tensor) and first.device.type == "cuda":
            is_sum = name.startswith("cumsum") and first.is_floating_point()
            if is_sum or name in {"put", "put_", "histc", "bincount", "median", "nll_loss_forward"}:
                self.found.add(name)
        return op(*args, **(kwargs or {}))


def test_a_whole_run_does_nothing_that_deterministic_refuses(bench: Any) -> None:
    with _Refused() as refused:
        bench.requests(1, Together(1, 1))
        choose(torch.zeros(2, 64, device="cuda:0"), [Draw(0.6, 8, 0.95, uniform=0.3)] * 2)
    assert not refused.found


def test_what_a_whole_run_reads_and_waits_for(bench: Any) -> None:
    gpu = bench.gpu
    gpu.reads.clear(), gpu.waits.clear()
    bench.requests(2, Together(2, 2))
    # Whether the picture is finite.
    assert gpu.reads == {"pipelines.image.stages.decode": 2}
    # The finished picture on its way back.
    assert set(gpu.waits) == {"models.hunyuan_image3.family.decode_latents"}


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_experts_that_wait_are_asked_for_once_a_layer_of_a_token(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """What a router has chosen is read, of few rows; of many, of a denoise step, nothing. The card
    has two layers, beside what stays. An older one makes FP8 weights dense.
    """
    gpu, layers = bench.gpu, bench.network.model.layers
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(footprint, "here", lambda: MachineInfo(has_gpu=True, has_triton=True))
    away = [tuple(_away(stack) for stack in layer.mlp.stacks) for layer in layers]
    before = gpu.rebase()
    outside = OffloadedExperts(away, torch.device("cuda:0"), 0)  # type: ignore[arg-type]
    form = bench.config.model.quantization
    slot = outside.expert_bytes  # one, though nothing stays: kernels have something to be made for
    whole = bench.card.weights.experts_nbytes("bfloat16", form) // LAYERS
    assert gpu.live - before == 2 * whole + slot
    for number, layer in enumerate(layers):
        monkeypatch.setattr(layer.mlp, "compute", outside.of_layer(number))
    gpu.reads.clear(), gpu.waits.clear()
    bench.decode_step(1)
    assert gpu.reads == {"kernels.offloaded_experts._computed": LAYERS * bench.load.arch.moe_topk}
    gpu.reads.clear()
    picture = bench._picture()
    planned = working(bench.card, bench.config)
    base = gpu.rebase()
    bench.network.velocity([picture])
    rows = 2 * bench.load.live * planned.row + planned.fixed
    assert 1.0 <= rows / (gpu.peak - base) <= 1.1
    assert not gpu.reads
    assert not gpu.waits


def test_slots_are_shown_to_no_kernel_that_reads_all_it_is_given(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Triton a library's kernel multiplies: of experts that wait it is given the chosen
    ones, not what stays of all layers.
    """
    given = []
    monkeypatch.setattr(choice, "most_few_rows", lambda *_: 0)
    for name in ("routed_experts", "scaled_experts"):
        monkeypatch.setattr(
            choice, name, lambda rows, stacks, **_: given.append(stacks[0].shape[0]) or rows.x_TM
        )
    away = [
        tuple(_away(stack) for stack in layer.mlp.stacks) for layer in bench.network.model.layers
    ]
    device = torch.device("cuda:0")
    outside = OffloadedExperts(away, device, 1 << 40)  # type: ignore[arg-type]
    assert outside.cache.count == LAYERS * bench.load.arch.num_experts
    rows = torch.ones(1, bench.load.arch.hidden_size, device=device, dtype=torch.bfloat16)
    index = torch.ones(1, 8, device=device, dtype=torch.int64)
    outside.of_layer(0)(RoutedTokens(rows, index.bfloat16(), index))
    assert given == [1]


@pytest.mark.parametrize("bench", ["fp8"], indirect=True)  # a format of experts alone
def test_a_vae_that_waits_is_there_for_its_turn_alone(bench: Any) -> None:
    """Also where the turn ends in an error; what it takes is what `plan` counts."""
    size, vae = SIZE, bench.network.vae
    there = [(m, *w) for m in vae.modules() for w in m.named_parameters(recurse=False)]
    for module, name, weight in there:
        setattr(module, name, nn.Parameter(weight.cpu(), requires_grad=False))
    try:
        model = HunyuanImage3(bench.network, bench.load.prompter, vae_waits=True)
        assert model.device_name == "cuda:0"
        home = list(vae.parameters())
        config = replace(bench.config, model=replace(bench.config.model, offloads_experts=True))
        jobs = [bench.load.request(0, steps=2, guidance=2.5)]
        planned, base = needs(jobs, bench.card, config, prefixes=0), bench.gpu.rebase()
        model.decode_latents(bench._latents())
        assert 1.0 <= planned.decode / (bench.gpu.peak - base) <= 1.1
        base = bench.gpu.rebase()
        latents = model._latents(np.zeros((size.height, size.width, 3), np.uint8), 0)
        assert latents.device.type == "cuda"
        assert 1.0 <= planned.encode / (bench.gpu.peak - base) <= 1.1
        del latents
        with pytest.raises(RuntimeError):
            model.decode_latents(torch.zeros(1, 2, 3))
        assert bench.gpu.live == base
        assert all(weight is own for weight, own in zip(vae.parameters(), home, strict=True))
        assert {weight.device.type for weight in home} == {"cpu"}
    finally:
        for module, name, weight in there:
            setattr(module, name, weight)


def _away(stack: Any) -> Any:
    """A stack in main memory."""
    return stack.cpu() if isinstance(stack, Tensor) else stack.transform(Tensor.cpu)


def test_mixed_devices_would_be_found(bench: Any) -> None:
    hidden_RM = torch.zeros(2, bench.load.arch.hidden_size, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="device"):
        bench.network.text_logits(hidden_RM)
    logits_RV = bench.network.text_logits(hidden_RM.to("cuda:0"))
    assert choose(logits_RV, [Draw(0.6, 1024, 0.95, uniform=0.3)] * 2).device.type == "cuda"
