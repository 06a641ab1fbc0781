"""Experts in 8 and 4 bits: the right numbers in the right places, and never all of them at once."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from wide_checkpoint import Anonymous, wide_checkpoint

from hyimg_cli.errors import CheckpointError, MachineError
from hyimg_cli.kernels.formats import LEVELS, dequantize_nf4, quantize_nf4
from hyimg_cli.models.hunyuan_image3.card import model_card
from hyimg_cli.models.hunyuan_image3.config import architecture
from hyimg_cli.models.hunyuan_image3.weights import (
    balanced,
    load,
    place_of,
    without_weights,
)

FORMS = ("fp8", "nf4")


def _in_shards(folder: Path, target: Path, count: int = 3) -> Path:
    """The same checkpoint in several files, experts of one layer spread over them."""
    tensors = load_file(folder / "model.safetensors")
    target.mkdir()
    weight_map = {name: f"model-{n % count}.safetensors" for n, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def _experts(network: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both stacks of a layer, made dense."""
    stacks = list(network.model.layers[layer].mlp.experts)
    gate_and_up, down = (
        torch.stack([stack.one(n, torch.float32) for n in range(stack.shape[0])])
        for stack in stacks
    )
    return gate_and_up, down


@pytest.mark.parametrize("form", FORMS)
def test_each_expert_stands_where_the_checkpoint_has_it(
    small_folder: Path, tmp_path: Path, form: Any
) -> None:
    network = load(
        _in_shards(small_folder, tmp_path / "shards"), dtype=torch.float32, quantization=form
    )
    stored = load_file(small_folder / "model.safetensors")
    gap = max(b - a for a, b in pairwise(LEVELS)) / 2
    for layer in range(len(network.model.layers)):
        for stack, matrix in zip(
            _experts(network, layer), ("gate_and_up_proj", "down_proj"), strict=True
        ):
            for expert, ours in enumerate(stack):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"
                off = (ours - stored[name].float()).abs()
                largest = float(stored[name].abs().max())
                assert 0 < float(off.max()) <= largest * (1 / 16 if form == "fp8" else gap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_else_is_as_without_quantization(small_folder: Path, dtype: Any) -> None:
    plain = load(small_folder, dtype=dtype)
    ours = dict(load(small_folder, dtype=dtype, quantization="fp8").named_parameters())
    others = {n: p for n, p in plain.named_parameters() if ".mlp.experts." not in n}
    assert ours.keys() == others.keys()
    for name, expected in others.items():
        assert ours[name].dtype == expected.dtype, name
        assert torch.equal(ours[name], expected), name
        assert not ours[name].requires_grad


def test_the_weights_of_a_layer_are_close_to_the_released_ones(small_folder: Path) -> None:
    plain = load(small_folder, dtype=torch.float32)
    x = torch.randn(30, plain.arch.hidden_size)
    expected = plain.model.layers[1].mlp(x)
    for form, most in (("fp8", 0.05), ("nf4", 0.15)):
        network = load(small_folder, dtype=torch.float32, quantization=form)
        off = network.model.layers[1].mlp(x) - expected
        assert 1e-4 < float(off.norm() / expected.norm()) < most


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_its_company(small_folder: Path, form: Any) -> None:
    moe = load(small_folder, dtype=torch.float32, quantization=form).model.layers[0].mlp
    x = torch.randn(44, 64)
    together = moe(x)
    assert torch.equal(moe(x[8:20]), together[8:20])


def test_already_quantised_weights_are_refused(small_folder: Path, tmp_path: Path) -> None:
    """Cast to floats without their scales they would draw noise, and say nothing."""
    target = _in_shards(small_folder, tmp_path / "fp8", 1)
    tensors = load_file(target / "model-0.safetensors")
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, target / "model-0.safetensors")
    for form in ("none", "fp8"):
        with pytest.raises(CheckpointError, match="1 tensors are stored as F8_E4M3: model") as bad:
            load(target, dtype=torch.float32, quantization=form)  # type: ignore[arg-type]
        assert bad.value.code == "checkpoint.quantized"


def _packed(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """The checkpoint with its experts in 4 bits and its attention in 8, as bitsandbytes saves them
    in one file; and the weights that they stand for.
    """
    tensors, kept, meant = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        stem = name.removesuffix("weight")
        if ".experts." in name:
            packed, absmax = quantize_nf4(tensor)
            state = {"blocksize": 64, "shape": list(tensor.shape)}
            state |= {"quant_type": "nf4", "dtype": "bfloat16"}
            text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
            kept |= {name: packed[:, None], f"{name}.absmax": absmax}
            kept |= {f"{name}.quant_map": torch.tensor(LEVELS)}
            kept |= {f"{name}.quant_state.bitsandbytes__nf4": text}
            meant[name] = dequantize_nf4(packed, absmax, torch.float32).view(tensor.shape)
        elif name.endswith("_proj.weight") and ".self_attn." in name and "layers" in name:
            scale = tensor.float().abs().amax(dim=1)
            kept |= {name: (tensor.float() / scale[:, None] * 127).round().to(torch.int8)}
            kept |= {
                f"{stem}SCB": scale,
                f"{stem}weight_format": torch.zeros((), dtype=torch.uint8),
            }
            meant[name] = kept[name].float() * scale[:, None] * (1 / 127)
        else:
            kept[name] = meant[name] = tensor
    target.mkdir()
    save_file(kept, target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return meant


def test_a_checkpoint_that_bitsandbytes_packed_is_loaded_strictly(
    small_folder: Path, tmp_path: Path
) -> None:
    """As it stands it has the weights that were meant; in 4 bits again, the experts' own bits."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    folder = tmp_path / "packed"
    meant = _packed(small_folder, folder)
    network = load(folder, dtype=torch.float32)
    again = _experts(load(folder, dtype=torch.float32, quantization="nf4"), 1)
    for number, matrix in enumerate(("gate_and_up_proj", "down_proj")):
        names = [f"model.layers.1.mlp.experts.{e}.{matrix}.weight" for e in range(len(again[0]))]
        expected = torch.stack([meant[name] for name in names])
        assert torch.equal(again[number], expected)
    others = dict(network.named_parameters())
    for name, expected in meant.items():
        assert torch.equal(others[name], expected.float()), name
    (folder / "generation_config.json").write_text("{}")
    assert model_card(folder, "packed").weights == model_card(small_folder, "small").weights


@pytest.mark.parametrize("part", ["", ".absmax", ".quant_map"])
def test_a_packed_checkpoint_that_lacks_a_part_is_refused(
    small_folder: Path, tmp_path: Path, part: str
) -> None:
    _packed(small_folder, tmp_path / "packed")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.2.down_proj.weight{part}"]
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj.*is missing"):
        load(tmp_path / "packed", dtype=torch.float32)


def test_a_mixture_of_floats_is_cast(small_folder: Path, tmp_path: Path) -> None:
    target = _in_shards(small_folder, tmp_path / "mixed", 2)
    tensors = load_file(target / "model-1.safetensors")
    wide = {n: t.double() if ".experts." in n else t.float() for n, t in tensors.items()}
    save_file(wide, target / "model-1.safetensors")
    ours = load(target, dtype=torch.float32, quantization="fp8")
    theirs = load(small_folder, dtype=torch.float32, quantization="fp8")
    for one, other in zip(_experts(ours, 0), _experts(theirs, 0), strict=True):
        assert torch.equal(one, other)


def test_a_missing_expert_is_named_before_anything_is_read(
    small_folder: Path, tmp_path: Path
) -> None:
    target = _in_shards(small_folder, tmp_path / "gap", 1)
    tensors = load_file(target / "model-0.safetensors")
    del tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
    save_file(tensors, target / "model-0.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-0.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.2\.down_proj"):
        load(target, dtype=torch.float32, quantization="fp8")


def test_layers_are_spread_in_even_parts_and_tensors_follow_them(small_folder: Path) -> None:
    config = json.loads((small_folder / "config.json").read_text()) | {"num_hidden_layers": 24}
    for name, value in (("moe_topk", 2), ("num_shared_expert", 1), ("moe_intermediate_size", 640)):
        config[name] = [value] * 24
    network = without_weights(architecture(config), "fp8")
    every = [*network.parameters(), *network.buffers()]
    total = sum(t.numel() * t.element_size() for t in every)
    places = balanced(network, torch.float32, {0: int(0.6 * total), 1: int(0.7 * total)})
    assert set(places.values()) == {0, 1}
    for number in range(24):
        names = [f"model.layers.{number}.{part}" for part in ("mlp.experts", "self_attn.qkv_proj")]
        assert len({place_of(name, places) for name in names}) == 1
    assert place_of("model.layers.0.mlp.experts", places) == torch.device("cuda", 0)
    with pytest.raises(MachineError, match="do not fit"):
        balanced(network, torch.float32, {0: int(0.4 * total), "cpu": 10 * total})


def test_loading_never_holds_the_experts_as_stored(tmp_path: Path, small_folder: Path) -> None:
    """Of 100 MB of experts in bfloat16, little more than their 8 bits is ever there."""
    config = json.loads((small_folder / "config.json").read_text())
    layers, experts = config["num_hidden_layers"], 128
    config |= {"num_experts": experts, "moe_intermediate_size": [640] * layers}
    folder = wide_checkpoint(tmp_path / "wide", config)
    (folder / "config.json").write_text(json.dumps(config))
    experts_bytes = layers * experts * 3 * 640 * config["hidden_size"] * 2
    with Anonymous() as memory:
        network = load(folder, dtype=torch.bfloat16, quantization="fp8")
    kept = sum(t.nbytes for t in (*network.parameters(), *network.buffers()))
    assert experts_bytes > 90e6
    assert kept < 0.65 * experts_bytes
    assert memory.grown < kept + 0.15 * experts_bytes
