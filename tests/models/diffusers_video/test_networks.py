"""Transformers as a run wants them: in groups and with another kernel, quantized, compiled."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hyimg_cli import errors
from hyimg_cli.errors import MachineError
from hyimg_cli.kernels.streamed_blocks import StreamedBlocks
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.networks import compile_blocks
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import VideoJob
from hyimg_cli.spec.options import Lora

Draw = Callable[[DiffusersVideo, VideoJob], Tensor]
LAYER = {
    "hunyuan": "transformer_blocks.0.attn.to_q",
    "wan": "blocks.0.attn1.to_q",
    "wan22": "blocks.0.attn1.to_q",
}


@pytest.fixture
def job(job: VideoJob) -> VideoJob:
    return replace(job, num_inference_steps=2)


def loaded(folder: Path, **how: Any) -> DiffusersVideo:
    return registry.load_video(ModelChoice(str(folder), dtype="float32", device="cpu", **how))


@pytest.mark.parametrize("name", ["hunyuan", "wan22"])
def test_blocks_in_groups_are_the_same_bits(
    models: dict[str, DiffusersVideo], folders: dict[str, Path], draw: Draw, job: VideoJob,
    monkeypatch: pytest.MonkeyPatch, name: str,
) -> None:  # fmt: skip
    """Each block comes by itself, once a forward and once for the forward that follows; the rest of
    its network comes with that alone. So do the blocks of text encoders.
    """
    brought = list[StreamedBlocks]()
    bring = StreamedBlocks._onload
    monkeypatch.setattr(
        StreamedBlocks, "_onload", lambda self, n: brought.append(self) or bring(self, n)
    )
    model = loaded(folders[name], cpu_offload="group")
    assert torch.equal(draw(model, job), draw(models[name], job))
    offload = model.place.offload
    streamed = [blocks for network in model.networks if (blocks := offload._kept[network])]
    blocks = [
        block
        for network in model.networks
        for block in getattr(network, "transformer_blocks", None) or network.blocks
    ]
    assert [block for one in streamed for block in one.blocks] == blocks
    assert set(brought) > set(streamed), "text encoders, too"
    forwards = 2 * len(model.texts(job)) // len(model.networks)
    count = len([one for one in brought if one in streamed])
    assert count == forwards * len(blocks) + len(streamed)
    of_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    assert offload._at_home
    assert of_blocks.isdisjoint(id(tensor) for tensor, _ in offload._at_home)
    model.unload_transformer()
    assert not offload._at_home


@pytest.mark.parametrize("name", ["hunyuan", "wan"])
def test_fp8_holds_weights_in_8_bits_and_a_lora_beside_them(
    models: dict[str, DiffusersVideo], folders: dict[str, Path], draw: Draw, job: VideoJob,
    tmp_path: Path, name: str,
) -> None:  # fmt: skip
    model = loaded(folders[name], quantization="fp8")
    plain = draw(model, job)
    assert model.networks[0].dtype == torch.float32
    layer = model.networks[0].get_submodule(LAYER[name])
    assert layer.weight.dtype == torch.float8_e4m3fn
    exact = draw(models[name], job)
    assert not torch.equal(plain, exact)
    assert (plain - exact).abs().mean() < 0.2 * exact.abs().mean()
    own = models[name].networks[0].get_submodule(LAYER[name]).weight
    assert torch.equal(layer.weight.float(), own.to(torch.float8_e4m3fn).float())

    torch.manual_seed(1)
    down, up = torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2)
    stem = f"transformer.{LAYER[name]}"
    save_file(
        {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}, tmp_path / "a.safetensors"
    )
    styled = replace(job, lora=(Lora(str(tmp_path / "a.safetensors")),))
    with_lora = draw(model, styled)
    assert not torch.equal(with_lora, plain)
    held = dict(model.networks[0].get_submodule(LAYER[name]).named_parameters())
    assert torch.equal(held["lora_A.lora0.weight"], down), "in full precision"
    assert torch.equal(draw(model, job), plain), "it leaves no trace"


def test_another_kernel_of_attention_is_this_models_alone(
    wan: DiffusersVideo, folders: dict[str, Path], draw: Draw, job: VideoJob,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The library has one for the whole process beside it."""
    calls: list[str] = []
    from diffusers.models import attention_dispatch

    backends = attention_dispatch._AttentionBackendRegistry._backends
    math = attention_dispatch.AttentionBackendName._NATIVE_MATH
    inner = backends[math]
    monkeypatch.setitem(
        backends, math, lambda *args, **named: calls.append("math") or inner(*args, **named)
    )
    before = draw(wan, job)
    other = loaded(folders["wan"], attention_backend="_native_math")
    assert torch.allclose(draw(other, job), before, atol=1e-3)
    assert calls
    count = len(calls)
    assert torch.equal(draw(loaded(folders["wan"]), job), before)
    assert torch.equal(draw(wan, job), before)
    assert len(calls) == count


def test_names_of_kernels_are_the_librarys() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName

    from hyimg_cli.settings.run import AttentionBackend

    of_other_devices = {"_native_npu", "_native_xla"}
    known = {name.value for name in AttentionBackendName} - of_other_devices
    assert set(get_args(AttentionBackend)) == known


def test_what_is_not_installed_is_named(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = errors.find_spec
    monkeypatch.setattr(
        errors, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    for how, said in (
        ({"quantization": "nf4"}, "bitsandbytes is not installed"),
        ({"attention_backend": "sage"}, "attention backend sage cannot be used here"),
    ):
        with pytest.raises(MachineError, match=said):
            loaded(folders["wan"], **how).load_transformer()


def test_blocks_are_compiled_where_that_is_asked_for(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import WanTransformer3DModel

    compiled: list[Any] = []
    monkeypatch.setattr(
        WanTransformer3DModel, "compile_repeated_blocks", lambda self: compiled.append(self)
    )
    model = loaded(folders["wan22"], compile_blocks=True)
    assert compiled == [], "nothing before it is loaded"
    assert model.networks == compiled


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["hunyuan", "wan"])
def test_ten_lengths_compile_nothing_after_the_second(
    folders: dict[str, Path], draw: Draw, job: VideoJob, name: str
) -> None:
    """A graph that breaks would raise; HunyuanVideo-1.5 also has two lengths of text at first."""
    graphs = list[Any]()

    def compiled(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, counts = loaded(folders[name]), list[int]()
    try:
        compile_blocks(model.networks[0], fullgraph=True, backend=compiled)
        for length in range(10):
            draw(model, replace(job, num_frames=5 + 4 * length, num_inference_steps=1))
            counts.append(len(graphs))
    finally:
        torch._dynamo.reset()
    assert 0 < counts[0] < counts[1] == counts[9] <= 8
