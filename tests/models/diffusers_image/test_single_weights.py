"""A single file loads as a folder with the same numbers, or is refused before it is read."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import single_files
import tiny_editors
import torch
from diffusers.loaders import single_file_utils
from models.diffusers_image.classic import Checkpoint
from safetensors.torch import save_file
from single_files import PREFIXES, by_authors, of_file, weights_of
from torch import Tensor

from hyimg_cli import errors
from hyimg_cli.errors import CheckpointError, MachineError
from hyimg_cli.kernels.offload import Offload
from hyimg_cli.models.diffusers_image.record import read_layout
from hyimg_cli.models.diffusers_video import lora, spellings
from hyimg_cli.models.diffusers_video.layout import Component
from hyimg_cli.models.diffusers_video.record import packed_weights
from hyimg_cli.models.diffusers_video.weights import LoadTarget, check_weights, load_weights
from hyimg_cli.spec.options import Lora

CPU = torch.device("cpu")
KINDS = (
    "klein",
    "flux3",
    "qwen-image-edit-2511",
    "z-image",
    "qwen-image-2.1",
    "kontext",
    "longcat",
)
AUTHORS = ("klein", "flux3", "z-image", "qwen-image-2.1", "kontext")
Tensors = dict[str, Tensor]


def transformer(folder: Path) -> Component:
    return read_layout(folder).components["transformer"]


def loaded(part: Component, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return load_weights(part, LoadTarget(Offload(CPU), dtype, **options))


def assert_equal(one: Any, other: Any) -> None:
    found, expected = one.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_the_weights_of_its_folder(
    kind: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    part, tensors = transformer(checkpoint(kind)), weights_of(checkpoint(kind))
    spelled = [tensors, *([by_authors(kind, tensors)] if kind in AUTHORS else [])]
    for dtype in (torch.float32, torch.bfloat16):
        expected = loaded(part, dtype)
        for prefix in PREFIXES:
            for own in spelled:
                save_file({prefix + n: one for n, one in own.items()}, tmp_path / "a.safetensors")
                one = of_file(part, tmp_path / "a.safetensors")
                assert check_weights(one) == sum(t.numel() for t in tensors.values())
                assert_equal(loaded(one, dtype), expected)


def test_authors_names_of_flux1_are_those_of_the_librarys_converter() -> None:
    """The library's has the released width written into it."""
    names = {
        f"{block}.{number}.{layer}.{kind}": rows
        for block, layers in {
            "double_blocks": {
                "img_mod.lin": 6, "txt_mod.lin": 6, "img_attn.qkv": 3, "txt_attn.qkv": 3,
                "img_attn.proj": 1, "txt_attn.proj": 1, "img_mlp.0": 4, "img_mlp.2": 1,
                "txt_mlp.0": 4, "txt_mlp.2": 1,
            },
            "single_blocks": {"modulation.lin": 3, "linear1": 7, "linear2": 1},
        }.items()
        for layer, rows in layers.items()
        for kind in ("weight", "bias")
        for number in range(2)
    }  # fmt: skip
    for layer in ("time_in", "vector_in", "guidance_in"):
        for side in ("in_layer", "out_layer"):
            names |= dict.fromkeys((f"{layer}.{side}.weight", f"{layer}.{side}.bias"), 1)
    for layer in ("img_in", "txt_in", "final_layer.linear", "final_layer.adaLN_modulation.1"):
        names |= dict.fromkeys((f"{layer}.weight", f"{layer}.bias"), 2)
    for number in range(2):
        for side in ("query", "key"):
            norms = ("double_blocks.{}.img_attn", "double_blocks.{}.txt_attn", "single_blocks.{}")
            names |= {f"{one}.norm.{side}_norm.scale".format(number): 1 for one in norms}
    tensors = {name: torch.randn(3072 * rows) for name, rows in names.items()}
    expected = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers(dict(tensors))
    found = spellings.spelled(tensors, expected.keys(), "FluxTransformer2DModel", Path()).tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def fault_of(part: Component, tensors: Tensors, folder: Path) -> CheckpointError:
    path = folder / "changed.safetensors"
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        check_weights(of_file(part, path))
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_gguf", [False, True], ids=["safetensors", "gguf"])
def test_other_tensors_are_named(
    kind: str, is_gguf: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    part, tensors = transformer(checkpoint(kind)), weights_of(checkpoint(kind))
    name = next(one for one in tensors if re.search(r"(blocks|layers)\.0\..*weight", one))
    shape = [*tensors[name].shape]
    for change, said in (
        ({name: None}, f"1 missing: {name}"),
        ({"model_ema": torch.zeros(2)}, "1 unexpected: model_ema"),
        ({name: torch.zeros(3, 5)}, f"{name} is [3, 5], expected {shape}"),
    ):
        for prefix in ("", "model.diffusion_model."):
            changed = {prefix + n: one for n, one in (tensors | change).items() if one is not None}
            path = tmp_path / f"changed.{'gguf' if is_gguf else 'safetensors'}"
            if is_gguf:
                own = {n: single_files.stored(one) for n, one in changed.items()}
                single_files.write_gguf(path, own)
            else:
                save_file(changed, path)
            with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
                check_weights(of_file(part, path))
            assert caught.value.code == "checkpoint.mismatch"
            assert path.name in caught.value.what
            assert "--components" in caught.value.hint


@pytest.mark.parametrize("kind", AUTHORS)
def test_other_tensors_are_named_in_authors_spelling(
    kind: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    part, tensors = transformer(checkpoint(kind)), weights_of(checkpoint(kind))
    own = by_authors(kind, tensors)
    block = next(name for name in own if re.search(r"(blocks|layers)\.0\.", name))
    more = re.sub(r"\.0\..*", ".0.extra.weight", block)
    assert f"1 unexpected: {more}" in fault_of(part, own | {more: torch.zeros(2)}, tmp_path).what
    both = own | {name: one + 1 for name, one in tensors.items() if name not in own}
    assert "twice" in fault_of(part, both, tmp_path).what or kind == "qwen-image-2.1"
    own.pop(block)
    assert "missing" in fault_of(part, own, tmp_path).what


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A klein whose rows are whole blocks of GGUF."""
    folder = tmp_path_factory.mktemp("wide") / "klein"
    return tiny_editors.write(
        folder, "klein", **tiny_editors.wide_parts("klein", with_encoder=False)
    )


def forward_of_klein(network: Any) -> Tensor:
    numbers, own = torch.Generator().manual_seed(1), network.config
    dtype = network.dtype
    with torch.no_grad():
        drawn: Tensor = network(
            hidden_states=torch.randn(1, 24, own.in_channels, generator=numbers).to(dtype),
            encoder_hidden_states=torch.randn(1, 9, own.joint_attention_dim, generator=numbers).to(
                dtype
            ),
            timestep=torch.tensor([0.5]).to(dtype),
            img_ids=torch.zeros(1, 24, 4),
            txt_ids=torch.zeros(1, 9, 4),
            guidance=None,
            return_dict=False,
        )[0]
    return drawn


def packed_pair(
    wide: Path, folder: Path, dtype: str, only: str = ""
) -> tuple[Component, Component]:
    """A GGUF file with random blocks of a type, and a folder with the same numbers."""
    of_gguf, of_folder = single_files.pack(weights_of(wide), dtype, only=only)
    copy = single_files.with_weights(wide, folder / "unpacked", of_folder)
    path = single_files.write_gguf(folder / f"a-{dtype}.gguf", of_gguf)
    return of_file(transformer(wide), path), transformer(copy)


@pytest.mark.parametrize("dtype", single_files.SCALES)
def test_gguf_draws_what_its_unpacked_numbers_draw(dtype: str, wide: Path, tmp_path: Path) -> None:
    part, folder = packed_pair(wide, tmp_path, dtype)
    check_weights(part)
    for precision in (torch.float32, torch.bfloat16):
        found = forward_of_klein(loaded(part, precision))
        assert found.isfinite().all()
        assert torch.equal(found, forward_of_klein(loaded(folder, precision)))


def test_gguf_in_bf16_is_unpacked_everywhere(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The library leaves packed norms as bytes."""
    folder = checkpoint("z-image")
    tensors = {name: one.bfloat16() for name, one in weights_of(folder).items()}
    copy = single_files.with_weights(folder, tmp_path / "bf16", tensors)
    own = {name: single_files.stored(one) for name, one in tensors.items()}
    part = of_file(transformer(folder), single_files.write_gguf(tmp_path / "a.gguf", own))
    for precision in (torch.float32, torch.bfloat16):
        assert_equal(loaded(part, precision), loaded(transformer(copy), precision))


def test_packed_tensors_of_no_linear_layer_are_unpacked(wide: Path, tmp_path: Path) -> None:
    """Norms and biases: the library leaves their bytes."""
    tensors = weights_of(wide)
    name = next(one for one, tensor in tensors.items() if tensor.shape == (32,))
    data = single_files.packed("Q8_0", (1, 32))
    own = {one: single_files.stored(tensor) for one, tensor in tensors.items()}
    own[name] = "Q8_0", (32,), data
    tensors[name] = single_files.unpacked("Q8_0", (1, 32), data)[0].float()
    path = single_files.write_gguf(tmp_path / "a.gguf", own)
    copy = single_files.with_weights(wide, tmp_path / "unpacked", tensors)
    assert_equal(loaded(of_file(transformer(wide), path)), loaded(transformer(copy)))


def test_gguf_by_authors_names(wide: Path, tmp_path: Path) -> None:
    """Packed matrices are cut and swapped as their numbers are, by the library's converter."""
    of_gguf, numbers = single_files.pack(by_authors("klein", weights_of(wide)), "Q8_0")
    packed = {name for name, (dtype, *_) in of_gguf.items() if dtype == "Q8_0"}
    assert {"double_blocks.0.img_attn.qkv.weight", "final_layer.adaLN_modulation.1.weight"} < packed
    convert = single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers
    unpacked = {name: one.contiguous() for name, one in convert(numbers).items()}
    copy = single_files.with_weights(wide, tmp_path / "unpacked", unpacked)
    part = of_file(transformer(wide), single_files.write_gguf(tmp_path / "a.gguf", of_gguf))
    check_weights(part)
    found, expected = loaded(part), loaded(transformer(copy))
    assert torch.equal(forward_of_klein(found), forward_of_klein(expected))


def lora_of(folder: Path, layer: str, rows: int, columns: int) -> Lora:
    numbers = torch.Generator().manual_seed(3)
    pairs = {
        "A": torch.randn(4, columns, generator=numbers),
        "B": torch.randn(rows, 4, generator=numbers),
    }
    path = folder / "style.safetensors"
    save_file({f"transformer.{layer}.lora_{n}.weight": one for n, one in pairs.items()}, path)
    return Lora(str(path), 0.7)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", ["Q4_K", "Q8_0"])
def test_a_lora_on_gguf(dtype: str, precision: torch.dtype, wide: Path, tmp_path: Path) -> None:
    drawn = []
    for part in packed_pair(wide, tmp_path, dtype):
        network = loaded(part, precision)
        layout = read_layout(wide)
        layout.components["transformer"] = part
        style = lora_of(tmp_path, "transformer_blocks.0.attn.to_out.0", 256, 256)
        adapters = lora.Adapters([network], layout)
        plain = forward_of_klein(network)
        adapters.use((style,))
        styled = forward_of_klein(network)
        adapters.use(())
        assert torch.equal(forward_of_klein(network), plain)
        assert not torch.equal(styled, plain)
        drawn.append(styled)
    assert torch.equal(*drawn)


@pytest.mark.parametrize("how", ["model", "group"])
def test_gguf_waits_in_main_memory(how: str, wide: Path, tmp_path: Path) -> None:
    part, folder = packed_pair(wide, tmp_path, "Q5_K")
    network = loaded(part, cpu_offload=how)
    assert torch.equal(forward_of_klein(network), forward_of_klein(loaded(folder)))


Change = Callable[[Tensors, str, Tensor, Tensor], dict[str, str]]


def scaled_file(tensors: Tensors, spelling: str, shape: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    """Return tensors with matrices in 8 bits and their scales, and as their products."""
    stored, multiplied = dict(tensors), dict(tensors)
    numbers = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "blocks" in name:
            rows = len(tensor) if shape else 1
            scale = torch.rand(rows, generator=numbers) * 0.01 + 0.001
            scale = scale.view([rows if one < 0 else one for one in shape] if shape else ())
            weight = (tensor / 0.01).to(torch.float8_e4m3fn)
            stored[name] = weight
            stored[name.removesuffix("weight") + spelling] = scale
            multiplied[name] = weight.float() * (scale.view(-1, 1) if shape else scale)
    return stored, multiplied


MARKS: dict[str, Callable[[Tensors], Tensors]] = {
    "": lambda tensors: {},
    "a mark of the file": lambda tensors: {"scaled_fp8": torch.empty(0).to(torch.float8_e4m3fn)},
    "scales of inputs": lambda tensors: {
        name.replace("weight_scale", "input_scale").replace("scale_weight", "scale_input"): one + 1
        for name, one in tensors.items()
        if "scale" in name
    },
    "formats of layers": lambda tensors: {
        name.replace("weight_scale", "comfy_quant").replace("scale_weight", "comfy_quant"): as_text(
            {"format": "float8_e4m3fn"}
        )
        for name in tensors
        if "scale" in name
    },
}


def as_text(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("spelling", ["scale_weight", "weight_scale"])
def test_scaled_8_bits_are_their_products(
    spelling: str, marks: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, shapes = checkpoint("klein"), ((), (-1,), (-1, 1))
    for shape, prefix in zip(shapes, ("", "model.diffusion_model.", ""), strict=True):
        stored, multiplied = scaled_file(weights_of(folder), spelling, shape)
        stored |= MARKS[marks](stored)
        path = tmp_path / "a.safetensors"
        save_file({prefix + name: one for name, one in stored.items()}, path)
        part = of_file(transformer(folder), path)
        check_weights(part)
        copy = single_files.with_weights(folder, tmp_path / f"a{len(shape)}", multiplied)
        for precision in (torch.float32, torch.bfloat16):
            assert_equal(loaded(part, precision), loaded(transformer(copy), precision))


def _first(names: Iterable[str], end: str) -> str:
    return next(name for name in names if name.endswith(end))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda all_: all_.pop(_first(all_, "weight_scale")), "stored in 8 bits with no scale"),
        (
            lambda all_: all_.update({_first(all_, "weight_scale"): torch.ones(3, 2)}),
            "a scale is one number, or one a row",
        ),
        (
            lambda all_: all_.update(
                {
                    _first(all_, "weight_scale").replace(
                        "weight_scale", "scale_weight"
                    ): torch.ones(())
                }
            ),
            "stored in 8 bits with two scales",
        ),
        (
            lambda all_: all_.update(
                {
                    _first(all_, "weight_scale").replace("weight_scale", "comfy_quant"): as_text(
                        {"format": "nvfp4"}
                    )
                }
            ),
            'is packed as "nvfp4"',
        ),
        (
            lambda all_: all_.update({"x.weight_scale": torch.ones(())}),
            "1 unexpected: x.weight_scale",
        ),
    ],
)
def test_8_bits_that_are_not_read(
    change: Callable[[Tensors], object], said: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    stored, _ = scaled_file(weights_of(checkpoint("klein")), "weight_scale", ())
    change(stored)
    assert said in fault_of(transformer(checkpoint("klein")), stored, tmp_path).what


def test_gguf_needs_its_package(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, _ = packed_pair(wide, tmp_path, "Q8_0")
    find = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "gguf" else find(name))
    for use in (check_weights, loaded):
        with pytest.raises(MachineError, match="gguf is not installed") as caught:
            use(part)
        assert "[gguf]" in caught.value.hint


def test_the_memory_of_gguf(wide: Path, tmp_path: Path) -> None:
    part, _ = packed_pair(wide, tmp_path, "Q4_K")
    layout = read_layout(wide)
    layout.components["transformer"] = part
    found = packed_weights(layout)
    assert found is not None
    tensors = part.tensors().values()
    assert found.nbytes == sum(one.bytes for one in tensors if one.dtype == "Q4_K")
    assert found.largest == 256 * 256 * 9
