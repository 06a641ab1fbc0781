"""Names in LoRA files and the layers they mean, held against headers alone before a run; no torch.

What the library converts itself (Wan's other spellings) is judged by its attention: a file of which
none fits is for another model. All is looked at again when the layers are there.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from hyimg_cli.errors import CheckpointError, JobError
from hyimg_cli.loading.checkpoint import TensorInfo, file_tensors, tensor_index
from hyimg_cli.models.diffusers_video.layout import HUNYUAN_VIDEO15, Component, read_layout
from hyimg_cli.spec.job import VideoJob
from hyimg_cli.spec.options import Lora

PREFIX = "transformer."
DOWN, UP, BIAS = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias"
_OTHERS = ("diffusion_model.", "lora_unet_")
_WAN_ATTENTION = re.compile(
    r"(?:diffusion_model\.|lora_unet_)blocks[._](\d+)[._](self|cross)_attn[._]([qkvo])"
    r"\.lora_(down|up|A|B)\.weight"
)
_WAN_LAYERS = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
# HunyuanVideo's names of layers, and the library's; three stand in one of the refiner's.
_HUNYUAN = {
    r"double_blocks\.(\d+)\.img_attn_([qkv])": r"transformer_blocks.\1.attn.to_\2",
    r"double_blocks\.(\d+)\.img_attn_proj": r"transformer_blocks.\1.attn.to_out.0",
    r"double_blocks\.(\d+)\.img_mlp\.fc1": r"transformer_blocks.\1.ff.net.0.proj",
    r"double_blocks\.(\d+)\.img_mlp\.fc2": r"transformer_blocks.\1.ff.net.2",
    r"double_blocks\.(\d+)\.img_mod\.linear": r"transformer_blocks.\1.norm1.linear",
    r"double_blocks\.(\d+)\.txt_attn_([qkv])": r"transformer_blocks.\1.attn.add_\2_proj",
    r"double_blocks\.(\d+)\.txt_attn_proj": r"transformer_blocks.\1.attn.to_add_out",
    r"double_blocks\.(\d+)\.txt_mlp\.fc1": r"transformer_blocks.\1.ff_context.net.0.proj",
    r"double_blocks\.(\d+)\.txt_mlp\.fc2": r"transformer_blocks.\1.ff_context.net.2",
    r"double_blocks\.(\d+)\.txt_mod\.linear": r"transformer_blocks.\1.norm1_context.linear",
    r"txt_in\.individual_token_refiner\.blocks\.(\d+)\.self_attn_qkv": (
        r"context_embedder.token_refiner.refiner_blocks.\1.attn.to_qkv"
    ),
    r"txt_in\.individual_token_refiner\.blocks\.(\d+)\.self_attn_proj": (
        r"context_embedder.token_refiner.refiner_blocks.\1.attn.to_out.0"
    ),
    r"txt_in\.individual_token_refiner\.blocks\.(\d+)\.mlp\.fc1": (
        r"context_embedder.token_refiner.refiner_blocks.\1.ff.net.0.proj"
    ),
    r"txt_in\.individual_token_refiner\.blocks\.(\d+)\.mlp\.fc2": (
        r"context_embedder.token_refiner.refiner_blocks.\1.ff.net.2"
    ),
    r"final_layer\.linear": "proj_out",
}


def check_loras(job: VideoJob, folder: Path) -> None:
    """Passes LoRAs that fit the checkpoint by their headers, and those that are not here. Raises
    JobError.
    """
    if not job.lora:
        return
    layout = read_layout(folder)
    for lora in job.lora:
        path = Path(lora.file).expanduser()
        if not lora.file or not path.is_file():
            continue
        part = layout.components.get(_component(lora))
        if part is None:
            continue
        why = _misfit(path, path.stat().st_mtime_ns, part, layout.family)
        if why:
            raise JobError(
                f"the LoRA {path.name} does not fit: {why}",
                where="lora",
                hint="use a file made for this very model",
                code="job.lora-no-match",
            )


def _component(lora: Lora) -> str:
    return "transformer_2" if lora.on == "low" else "transformer"


@lru_cache(maxsize=64)
def _misfit(path: Path, _changed: int, part: Component, family: str) -> str:
    """Why a file fits no layer; empty where it does, or nothing is known."""
    try:
        layers = tensor_index(part.folder, part.stem)
    except CheckpointError:
        return ""  # its weights are fetched later, and looked at then
    try:
        tensors = file_tensors(path)
    except CheckpointError as error:
        return error.what
    if all(name.startswith(PREFIX) for name in tensors):
        wrong = [name for name in tensors if not _fits(name, tensors, layers)]
    elif family == HUNYUAN_VIDEO15:
        wrong = [name for name in tensors if not _is_hunyuans(name, layers)]
    else:
        known = list(_of_wan(tensors, layers))
        if any(fits for _, fits in known) or (
            not known and any(name.startswith(_OTHERS) for name in tensors)
        ):
            return ""
        wrong = [name for name, _ in known] or list(tensors)
    if not wrong and tensors:
        return ""
    first = f", the first {sorted(wrong)[0]}" if wrong else ""
    return f"{part.name} has no layer for {len(wrong)} of its {len(tensors)} entries{first}"


def _fits(name: str, tensors: Mapping[str, TensorInfo], layers: Mapping[str, TensorInfo]) -> bool:
    """True if an entry in the library's names is half of a pair of a layer's shape."""
    suffix = next((end for end in (DOWN, UP, BIAS) if name.endswith(end)), None)
    if suffix is None:
        return False
    stem = name.removesuffix(suffix)
    weight = layers.get(f"{stem.removeprefix(PREFIX)}.weight")
    down, up = tensors.get(stem + DOWN), tensors.get(stem + UP)
    if weight is None or down is None or up is None:
        return False
    if not len(weight.shape) == len(down.shape) == len(up.shape) == 2:
        return False
    return (up.shape[0], down.shape[1]) == weight.shape and down.shape[0] == up.shape[1]


def _is_hunyuans(name: str, layers: Mapping[str, TensorInfo]) -> bool:
    """True if an entry in HunyuanVideo's own names is of a layer that is there."""
    layer, _, part = name.removeprefix("diffusion_model.").rpartition(
        ".lora_" if ".lora_" in name else "."
    )
    found = hunyuan_name(layer)
    known = part.split(".")[0] in ("A", "B", "down", "up", "alpha")
    if found is None or not known:
        return False
    if found.endswith("to_qkv"):
        found = found.removesuffix("qkv") + "q"
    return f"{found}.weight" in layers


def _of_wan(
    tensors: Mapping[str, TensorInfo], layers: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, bool]]:
    """Entries of attention in Wan's other spellings, and whether each fits its layer."""
    for name, info in tensors.items():
        match = _WAN_ATTENTION.fullmatch(name)
        if match is None:
            continue
        block, kind, layer, side = match.groups()
        attention = "attn1" if kind == "self" else "attn2"
        weight = layers.get(f"blocks.{block}.{attention}.{_WAN_LAYERS[layer]}.weight")
        is_up = side in ("up", "B")
        own = 0 if is_up else 1
        fits = weight is not None and len(info.shape) == 2 and info.shape[own] == weight.shape[own]
        yield name, fits


def hunyuan_name(layer: str) -> str | None:
    """The library's name of one of HunyuanVideo's layers; None where there is none."""
    for pattern, name in _HUNYUAN.items():
        match = re.fullmatch(pattern, layer)
        if match is not None:
            return match.expand(name)
    return None
