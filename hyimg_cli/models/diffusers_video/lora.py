"""LoRA files on a checkpoint's transformers, as layers beside the weights: these stay as they are,
so that a job without a LoRA has the very bits of a run that never saw one.

    transformer.blocks.0.attn1.to_q.lora_A.weight             the library's names
    diffusion_model.blocks.0.self_attn.q.lora_down.weight     Wan's own, with alpha; converted there
    lora_unet_blocks_0_self_attn_q.lora_down.weight           musubi's, for Wan; converted there
    diffusion_model.double_blocks.0.img_attn_q...             HunyuanVideo's own; converted here

A pair that finds no layer of its shape is an error: the library would say nothing, or log it.
"""

# Legend: R rank, I O values in and out of a layer
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor, nn

from hyimg_cli.errors import CheckpointError, require
from hyimg_cli.files import json_of
from hyimg_cli.loading.checkpoint import readable
from hyimg_cli.models.diffusers_video.layout import HUNYUAN_VIDEO15
from hyimg_cli.models.diffusers_video.lora_names import BIAS, DOWN, PREFIX, UP, hunyuan_name
from hyimg_cli.models.lora_files import lora_file
from hyimg_cli.spec.options import Lora

_DIFFERENCES = (".diff", ".diff_b")


class Adapters:
    """The LoRAs that are on some transformers: those of one job at a time."""

    def __init__(self, networks: Sequence[Any], family: str) -> None:
        """`networks`: the transformer, or the high-noise one and the low-noise one."""
        self._networks, self._family = networks, family
        self._now: tuple[Lora, ...] = ()

    def use(self, loras: tuple[Lora, ...]) -> None:
        """Have these on the transformers, and no others. Raises CheckpointError for a file that
        does not fit; there are none then.
        """
        if loras == self._now:
            return
        self.clear()
        require("peft", extra="lora")
        try:
            for number, lora in enumerate(loras):
                for network in self._of(lora):
                    self._load(network, lora, f"lora{number}")
            for network in self._networks:
                _activate(network, {f"lora{n}": lora for n, lora in enumerate(loras)})
        except BaseException:
            self.clear()
            raise
        self._now = loras

    def clear(self) -> None:
        """Take every LoRA off: the layers are the loaded ones again."""
        self._now = ()
        for network in self._networks:
            if getattr(network, "peft_config", None):
                network.unload_lora()

    def _of(self, lora: Lora) -> Sequence[Any]:
        if not lora.file:
            return ()
        return self._networks[-1:] if lora.on == "low" else self._networks[:1]

    def _load(self, network: Any, lora: Lora, name: str) -> None:
        pairs, metadata = _pairs(lora_file(lora.file), network, self._family)
        _refuse_misfits(pairs, network, lora.file)
        network.load_lora_adapter(pairs, adapter_name=name, metadata=metadata, prefix="transformer")
        _hold_in_full(network, pairs, name)
        network.requires_grad_(False)
        network.eval()


def _hold_in_full(network: Any, pairs: Mapping[str, Tensor], name: str) -> None:
    """Matrices as the file has them: peft gives them the dtype of their layer's weight, which in
    8 bits would round them, and which no product is made in.
    """
    for key, tensor in pairs.items():
        layer, _, part = key.removeprefix(PREFIX).rpartition(".lora_")
        side, _, kind = part.partition(".")
        matrix = getattr(network.get_submodule(layer), f"lora_{side}")[name]
        held = getattr(matrix, kind)
        if held.dtype.is_floating_point and held.dtype.itemsize == 1:
            held.data = tensor.to(held.device, network.dtype)


def _activate(network: Any, loras: Mapping[str, Lora]) -> None:
    """Each by its weight."""
    names = [name for name in loras if name in (getattr(network, "peft_config", None) or {})]
    if names:
        network.set_adapters(names, [loras[name].weight for name in names])


def _pairs(file: Path, network: Any, family: str) -> tuple[dict[str, Tensor], Any]:
    """A file's tensors by the library's names, and what its header says of alpha."""
    from diffusers import WanPipeline  # slow: its text encoder comes with it

    with readable(file), safetensors.safe_open(file, framework="pt") as opened:
        header = opened.metadata() or {}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    said = header.get("lora_adapter_metadata")
    try:
        metadata = None if said is None else json_of(said)
    except ValueError as error:
        why = f"its adapter's metadata is no JSON ({error})"
        raise _misfit(file, sorted(tensors), why) from None
    if all(name.startswith(PREFIX) for name in tensors):
        return tensors, metadata
    if family == HUNYUAN_VIDEO15:
        return _from_hunyuan(tensors, file), None
    if not any(name.startswith(("diffusion_model.", "lora_unet_")) for name in tensors):
        raise _misfit(file, sorted(tensors), "no name in it is one of this family's")
    try:
        found = WanPipeline.lora_state_dict(tensors)
    except (ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise _misfit(file, sorted(tensors), f"its names cannot be converted ({error})") from error
    return WanPipeline._maybe_expand_t2v_lora_for_i2v(network, found), None


def left_out(file: Path) -> list[str]:
    """Entries that the library converts to nothing, without a word: differences of whole tensors,
    such as norms, which no pair stands beside. Those of zeros are not counted.
    """
    with readable(file), safetensors.safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
        return [
            name
            for name in sorted(names)
            if name.endswith(_DIFFERENCES) and not _is_applied(name, names)
            if opened.get_tensor(name).any()
        ]


def _is_applied(name: str, names: set[str]) -> bool:
    """True for the bias of a pair's layer, and for the head, which has one of its own."""
    layer = name.rpartition(".")[0]
    is_head = layer.endswith("head.head") and f"{layer}.diff" in names
    has_pair = bool({f"{layer}.lora_down.weight", f"{layer}.lora_A.weight"} & names)
    return is_head or (has_pair and name.endswith(".diff_b"))


def _from_hunyuan(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """HunyuanVideo's own names as the library's, alpha / rank multiplied into the second matrix."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("diffusion_model.")
        layer, _, part = plain.replace(".lora_down.", ".lora_A.").replace(
            ".lora_up.", ".lora_B."
        ).rpartition(".lora_" if "lora_" in plain else ".")  # fmt: skip
        layers.setdefault(layer, {})[part] = tensor
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    for layer, parts in layers.items():
        target = hunyuan_name(layer)
        if target is None or not {"A.weight", "B.weight"} <= parts.keys() <= {
            "A.weight", "B.weight", "alpha",
        }:  # fmt: skip
            unknown.append(layer)
            continue
        down_RI, up_OR = parts["A.weight"], parts["B.weight"]
        if "alpha" in parts:
            up_OR = up_OR * (parts["alpha"].item() / down_RI.shape[0])
        if target.endswith("to_qkv"):
            for own, up in zip("qkv", up_OR.chunk(3), strict=True):
                _add(found, f"{target.removesuffix('qkv')}{own}", down_RI, up.contiguous())
        else:
            _add(found, target, down_RI, up_OR)
    if unknown:
        raise _misfit(file, sorted(unknown), "the transformer has no such layers")
    return found


def _add(found: dict[str, Tensor], layer: str, down_RI: Tensor, up_OR: Tensor) -> None:
    found[f"{PREFIX}{layer}{DOWN}"], found[f"{PREFIX}{layer}{UP}"] = down_RI, up_OR


def _refuse_misfits(pairs: Mapping[str, Tensor], network: Any, file: str) -> None:
    """Raises CheckpointError unless every tensor is half of a pair that fits a layer."""
    layers = dict(network.named_modules())
    wrong = []
    for name, tensor in pairs.items():
        suffix = next((end for end in (DOWN, UP, BIAS) if name.endswith(end)), None)
        layer = layers.get(name.removeprefix(PREFIX).removesuffix(suffix or ""))
        base = getattr(layer, "base_layer", layer)
        if suffix is None or not isinstance(base, nn.Linear) or not name.startswith(PREFIX):
            wrong.append(name)
            continue
        whole = name.removesuffix(suffix)
        down, up = pairs.get(whole + DOWN), pairs.get(whole + UP)
        fits = (
            down is not None
            and up is not None
            and (down.shape[0], down.shape[1]) == (up.shape[1], base.in_features)
            and up.shape[0] == base.out_features
            and (suffix != BIAS or tensor.shape[0] == base.out_features)
        )
        if not fits:
            wrong.append(name)
    if wrong or not pairs:
        raise _misfit(
            Path(file), sorted(wrong), "the transformer has no layer of the name and shape"
        )


def _misfit(file: Path, names: Sequence[str], why: str) -> CheckpointError:
    count = f"{len(names)} of its entries" if names else "it"
    return CheckpointError(
        f"the LoRA {file.name} does not fit: {why}: {count}"
        + (f", the first {', '.join(names[:3])}" if names else " is empty"),
        where=file,
        hint="use a file made for this very model",
        code="lora.no-match",
    )
