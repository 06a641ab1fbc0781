"""Transformers of tiny checkpoints as single files: other names, prefixes, GGUF and 8 bits.

What a file must draw is what a folder with the same numbers draws.
"""

import re
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from model_files import NUMBERS, text
from safetensors.torch import load_file, save_file
from torch import Tensor

from hyimg_cli.loading.single_file import read_single_file
from hyimg_cli.models.diffusers_video.layout import Component

WEIGHTS = "diffusion_pytorch_model.safetensors"
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.")
# Of a block of each type, where its scales begin, in 16 bits each.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
# Of a class, its layers' names in the library, and how its authors call them.
_KLEIN = (
    (r"^x_embedder", "img_in"),
    (r"^context_embedder", "txt_in"),
    (r"^time_guidance_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
    (r"^time_guidance_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
    (r"modulation(\w*)\.linear", r"modulation\1.lin"),
    (r"^proj_out", "final_layer.linear"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^single_transformer_blocks\.", "single_blocks."),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"attn\.to_qkv_mlp_proj", "linear1"),
    (r"single_blocks\.(\d+)\.attn\.to_out", r"single_blocks.\1.linear2"),
    (r"single_blocks\.(\d+)\.attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
    (r"single_blocks\.(\d+)\.attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
    (r"attn\.norm_q\.weight", "img_attn.norm.query_norm.scale"),
    (r"attn\.norm_k\.weight", "img_attn.norm.key_norm.scale"),
    (r"attn\.norm_added_q\.weight", "txt_attn.norm.query_norm.scale"),
    (r"attn\.norm_added_k\.weight", "txt_attn.norm.key_norm.scale"),
    (r"attn\.to_out\.0", "img_attn.proj"),
    (r"attn\.to_add_out", "txt_attn.proj"),
    (r"ff_context\.linear_in", "txt_mlp.0"),
    (r"ff_context\.linear_out", "txt_mlp.2"),
    (r"ff\.linear_in", "img_mlp.0"),
    (r"ff\.linear_out", "img_mlp.2"),
)
_KONTEXT = (
    (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
    (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
    (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
    (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
    (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
    (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
    (r"^(single_transformer_blocks\.\d+)\.norm\.linear", r"\1.modulation.lin"),
    (r"^(single_transformer_blocks\.\d+)\.proj_out", r"\1.linear2"),
    (r"norm1\.linear", "img_mod.lin"),
    (r"norm1_context\.linear", "txt_mod.lin"),
    (r"ff_context\.net\.0\.proj", "txt_mlp.0"),
    (r"ff_context\.net\.2", "txt_mlp.2"),
    (r"ff\.net\.0\.proj", "img_mlp.0"),
    (r"ff\.net\.2", "img_mlp.2"),
    *_KLEIN,
)
_Z_IMAGE = (
    (r"^all_final_layer\.2-1\.", "final_layer."),
    (r"^all_x_embedder\.2-1\.", "x_embedder."),
    (r"attention\.to_out\.0", "attention.out"),
    (r"attention\.norm_k", "attention.k_norm"),
    (r"attention\.norm_q", "attention.q_norm"),
)
_FLUX3 = (
    (r"^x_embedders\.", "emb_in."),
    (r"^context_embedder\.", "txt_in."),
    (r"^timestep_embedder\.linear_1", "time_in.in_layer"),
    (r"^timestep_embedder\.linear_2", "time_in.out_layer"),
    (r"^target_timestep_embedder\.linear_1", "ref_time_in.in_layer"),
    (r"^target_timestep_embedder\.linear_2", "ref_time_in.out_layer"),
    (r"^proj_out", "final_layer.image.linear"),
    (r"^norm_out\.linear", "final_layer.image.adaLN_modulation.1"),
    (r"^mode_blocks\.", "content_mode_blocks."),
    (r"^single_transformer_blocks\.", "single_blocks."),
    (r"modulations\.(\w+)\.linear", r"modulations.\1.lin"),
    (r"attn\.to_(q|k|v)\.", r"\1_proj."),
    (r"attn\.to_out\.0", "attn_out"),
    (r"attn\.norm_q\.weight", "norm.query_norm.scale"),
    (r"attn\.norm_k\.weight", "norm.key_norm.scale"),
    (r"ff\.linear_(in|out)", r"mlp_\1"),
)
_AUTHORS = {
    "klein": _KLEIN, "flux3": _FLUX3, "kontext": _KONTEXT, "z-image": _Z_IMAGE,
    "qwen-image-2.1": (),
}  # fmt: skip
# Of a class, layers that its authors have as one.
_FUSED = {
    "klein": {
        "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    },
    "flux3": {},
    "z-image": {"attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v")},
    "qwen-image-2.1": {"img_mlp.gate_up": ("img_mlp.gate_layer", "img_mlp.proj")},
}
_FUSED["kontext"] = _FUSED["klein"] | {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
}


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "transformer" / WEIGHTS)


def with_weights(folder: Path, copy: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Copy a checkpoint with another transformer of the same class."""
    shutil.copytree(folder, copy)
    save_file(dict(tensors), copy / "transformer" / WEIGHTS, {"format": "pt"})
    return copy


def by_authors(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a transformer's tensors as the model's authors store them."""
    found, left = dict[str, Tensor](), dict(tensors)
    for fused, parts in _FUSED[kind].items():
        for name in list(left):
            block, own, rest = name.partition(parts[0])
            names = [f"{block}{one}{rest}" for one in parts]
            # q, k and v of FLUX.1's two kinds of blocks have the same names.
            if own and all(one in left for one in names):
                found[f"{block}{fused}{rest}"] = torch.cat([left.pop(one) for one in names])
    found |= left
    made = dict[str, Tensor]()
    for name, tensor in found.items():
        own = name
        for pattern, replacement in _AUTHORS[kind]:
            own = re.sub(pattern, replacement, own)
        if kind != "z-image" and re.match(r"final_layer\..*adaLN", own):
            tensor = torch.cat([*reversed(tensor.chunk(2))])
        made[own] = tensor.contiguous()
    return made


def packed(dtype: str, shape: tuple[int, int], seed: int = 0) -> bytes:
    """Return a random matrix in one of ggml's types, with scales as those of weights."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    count = shape[0] * shape[1] // numbers
    made = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=made)
    for start in SCALES[dtype]:
        scales = (torch.rand(count, 1, generator=made) * 0.002 + 0.0005).half()
        blocks[:, start : start + 2] = scales.view(torch.uint8)
    return blocks.numpy().tobytes()


def unpacked(dtype: str, shape: tuple[int, int], data: bytes) -> Tensor:
    """Return a matrix as the library unpacks it."""
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape[0], -1)
    parameter = GGUFParameter(rows, quant_type=GGMLQuantizationType[dtype])
    unpacked: Tensor = dequantize_gguf_tensor(parameter)
    return unpacked


Stored = tuple[str, tuple[int, ...], bytes]
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def stored(tensor: Tensor) -> Stored:
    """Return a tensor as GGUF stores numbers that are not packed."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return DTYPES[tensor.dtype], tuple(tensor.shape), data


def write_gguf(path: Path, tensors: Mapping[str, Stored], keys: Iterable[bytes] = ()) -> Path:
    """Write a GGUF file. The package has no writer for most types."""
    keys, header, data = [*keys], b"", b""
    for name, (dtype, shape, own) in tensors.items():
        header += text(name) + struct.pack("<I", len(shape))
        header += b"".join(struct.pack("<Q", side) for side in reversed(shape))
        header += struct.pack("<IQ", NUMBERS[dtype], len(data))
        data += own + bytes(-len(own) % 32)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys) + header
    path.write_bytes(start + bytes(-len(start) % 32) + data)
    return path


def pack(
    tensors: Mapping[str, Tensor], dtype: str, *, only: str = ""
) -> tuple[dict[str, Stored], dict[str, Tensor]]:
    """Return tensors with random matrices of a type, as a file stores them and as numbers.

    Matrices whose rows are whole blocks are packed, and of these those whose names match `only`.
    """
    numbers, _ = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    of_file, of_folder = dict[str, Stored](), dict[str, Tensor]()
    for seed, (name, tensor) in enumerate(tensors.items()):
        of_file[name], of_folder[name] = stored(tensor), tensor
        if tensor.ndim == 2 and tensor.shape[1] % numbers == 0 and re.search(only, name):
            shape = (tensor.shape[0], tensor.shape[1])
            data = packed(dtype, shape, seed)
            of_file[name] = dtype, shape, data
            of_folder[name] = unpacked(dtype, shape, data).to(tensor.dtype)
    return of_file, of_folder


def of_file(part: Component, path: Path) -> Component:
    return replace(part, weights=read_single_file(path))
