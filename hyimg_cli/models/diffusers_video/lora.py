"""LoRA files as layers next to a checkpoint's weights, which stay unchanged.

    transformer.blocks.0.attn1.to_q.lora_A.weight             the library's names
    diffusion_model.blocks.0.self_attn.q.lora_down.weight     Wan's own, with alpha; converted there
    lora_unet_blocks_0_self_attn_q.lora_down.weight           musubi's, for Wan; converted there
    diffusion_model.double_blocks.0.img_attn_q...             HunyuanVideo's own; converted here
    transformer_blocks.0.attn.to_q.lora_down.weight           of pictures, as the library's loader
                                                              of their pipeline reads it

So a job without a LoRA has the bits of a run without any. A pair that fits no layer is an error;
the library would only log it. Local files are compared with the checkpoint's headers before a run,
by the same code.
"""

# Legend: R rank, I O values in and out of a layer
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from hyimg_cli.errors import CheckpointError, JobError, require
from hyimg_cli.files import json_of
from hyimg_cli.loading.checkpoint import TensorInfo, readable
from hyimg_cli.models.diffusers_video.layout import (
    HUNYUAN_VIDEO15,
    WAN,
    CheckpointLayout,
    Component,
)
from hyimg_cli.models.lora_files import lora_file
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.options import Lora

PREFIX = "transformer."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
_DIFFERENCES = (".diff", ".diff_b")
_HINT = "use a LoRA made for this model"
# From HunyuanVideo's names of layers to the library's, one after the other.
_HUNYUAN = (
    (r"^double_blocks\.", "transformer_blocks."),
    (
        r"^txt_in\.individual_token_refiner\.blocks\.",
        "context_embedder.token_refiner.refiner_blocks.",
    ),
    (r"\.self_attn_qkv$", ".attn.to_qkv"),
    (r"\.img_attn_([qkv])$", r".attn.to_\1"),
    (r"\.txt_attn_([qkv])$", r".attn.add_\1_proj"),
    (r"\.(img|self)_attn_proj$", ".attn.to_out.0"),
    (r"\.txt_attn_proj$", ".attn.to_add_out"),
    (r"\.(img_)?mlp\.", ".ff."),
    (r"\.txt_mlp\.", ".ff_context."),
    (r"\.fc1$", ".net.0.proj"),
    (r"\.fc2$", ".net.2"),
    (r"\.img_mod\.linear$", ".norm1.linear"),
    (r"\.txt_mod\.linear$", ".norm1_context.linear"),
    (r"^final_layer\.linear$", "proj_out"),
)


def check_loras(job: Job, layout: CheckpointLayout) -> None:
    """Raise JobError for LoRAs that do not fit the checkpoint; missing files pass."""
    for lora in job.lora:
        path, part = Path(lora.file).expanduser(), _component(lora, layout)
        if not lora.file or not path.is_file() or part is None:
            continue
        why = _misfit_of(path, path.stat().st_mtime_ns, part, layout.family)
        if why:
            raise JobError(why, where="lora", hint=_HINT, code="job.lora-no-match")


@lru_cache(maxsize=64)
def _misfit_of(path: Path, _changed: int, part: Component, family: str) -> str:
    """Return why a file fits no layer; empty if it does, or if weights come later."""
    if not part.known_tensors():
        return ""
    try:
        _read_pairs(path, part, family)
    except CheckpointError as error:
        is_misfit = error.code == "lora.no-match"
        return error.what if is_misfit else f"the LoRA {path.name} does not fit: {error.what}"
    return ""


def _component(lora: Lora, layout: CheckpointLayout) -> Component | None:
    return layout.components.get("transformer_2" if lora.on == "low" else "transformer")


class Adapters:
    """The LoRAs that are applied to some transformers, for one job at a time."""

    def __init__(
        self,
        networks: Sequence[Any],
        layout: CheckpointLayout,
        bring_home: Callable[[], object] = int,
    ) -> None:
        """Start without LoRAs. `networks`: the transformer, or the high-noise and low-noise ones.

        `bring_home` moves their weights to main memory before layers change.
        """
        self._networks, self._layout, self._bring_home = networks, layout, bring_home
        self._now: tuple[Lora, ...] = ()

    def use(self, loras: tuple[Lora, ...]) -> None:
        """Apply these LoRAs and no others. Raises CheckpointError if one does not fit."""
        if loras == self._now:
            return
        self._bring_home()
        self.clear()
        require("peft", extra="lora")
        try:
            for number, lora in enumerate(loras):
                if lora.file:
                    self._load(lora, f"lora{number}")
            weights = {f"lora{number}": lora.weight for number, lora in enumerate(loras)}
            for network in self._networks:
                held = getattr(network, "peft_config", None) or {}
                names = [name for name in weights if name in held]
                if names:
                    network.set_adapters(names, [weights[name] for name in names])
        except BaseException:
            self.clear()
            raise
        self._now = loras

    def clear(self) -> None:
        """Remove every LoRA: the layers are the loaded ones again."""
        self._now = ()
        for network in self._networks:
            if getattr(network, "peft_config", None):
                network.unload_lora()

    def _load(self, lora: Lora, name: str) -> None:
        part, file = _component(lora, self._layout), lora_file(lora.file)
        assert part is not None, "only a checkpoint of two transformers takes a LoRA on one of them"
        network = self._networks[-1 if lora.on == "low" else 0]
        pairs, scales = _read_pairs(file, part, self._layout.family, network)
        with warnings.catch_warnings():
            # The warning that an adapter already exists, which is intended.
            warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
            network.load_lora_adapter(pairs, adapter_name=name, prefix="transformer", **scales)
        # Matrices as in the file. peft gives them the dtype of their layer's weight, which in 8
        # bits would round them, and which has no products.
        for key, tensor in pairs.items():
            layer, _, matrix = key.removeprefix(PREFIX).rpartition(".lora_")
            side, _, kind = matrix.partition(".")
            held = getattr(getattr(network.get_submodule(layer), f"lora_{side}")[name], kind)
            if held.dtype.is_floating_point and held.dtype.itemsize == 1:
                held.data = tensor.to(held.device, network.dtype)
        network.requires_grad_(False)
        network.eval()


def _read_pairs(
    file: Path, part: Component, family: str, network: Any = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a file's tensors by the library's names, and its alpha values.

    Each half of a pair fits a layer of `part`. `network`: adds zeros for its layers that a file for
    text-to-video lacks. Raises CheckpointError.
    """
    import diffusers  # slow: it imports a pipeline's text encoder

    library: Any = getattr(diffusers, {WAN: "WanPipeline"}.get(family, family), None)
    with readable(file), safetensors.safe_open(file, framework="pt") as opened:
        header = opened.metadata() or {}
        pairs = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    said = header.get("lora_adapter_metadata")
    try:
        metadata = None if said is None else json_of(said)
    except ValueError as error:
        why = f"its metadata is not JSON ({error})"
        raise _misfit(file, (), why) from None
    layers, alphas = part.tensors(), None
    if lost := [name for name in pairs if "dora_scale" in name]:
        raise _misfit(file, lost, "DoRA scales are not supported")
    if not all(name.startswith(PREFIX) and not name.endswith(".alpha") for name in pairs):
        metadata = None
        if family == HUNYUAN_VIDEO15:
            pairs = _from_hunyuan(pairs, file)
        else:
            try:
                made = library.lora_state_dict(pairs, return_alphas=True)
                # FLUX.1's loader leaves some alphas separate.
                pairs, alphas = made if isinstance(made, tuple) else (made, None)
            except (ValueError, KeyError, RuntimeError, AttributeError) as error:
                why = f"its names cannot be converted ({error})"
                raise _misfit(file, list(pairs), why) from error
            if network is not None and family == WAN:
                pairs = library._maybe_expand_t2v_lora_for_i2v(network, pairs)
    wrong = [name for name in pairs if not _is_fitting(name, pairs, layers)]
    if wrong or not pairs:
        why = f"{part.name} has no layer for {len(wrong)} of its {len(pairs)} entries"
        raise _misfit(file, wrong, why if pairs else "none of its names belongs to a layer")
    return pairs, {"metadata": metadata, "network_alphas": alphas}


def _is_fitting(name: str, pairs: Mapping[str, Tensor], layers: Mapping[str, TensorInfo]) -> bool:
    """Return True for half of a pair that fits a layer, or its bias."""
    stem, _, half = name.removeprefix(PREFIX).partition(".lora_")
    weight, down = layers.get(f"{stem}.weight"), pairs.get(f"{PREFIX}{stem}{DOWN}")
    if weight is None or down is None or f"{PREFIX}{stem}{UP}" not in pairs:
        return False
    if len(weight.shape) != 2 or not name.startswith(PREFIX):
        return False
    (rows, columns), rank = weight.shape, down.shape[:1]
    shapes = {"A.weight": (*rank, columns), "B.weight": (rows, *rank), "B.bias": (rows,)}
    return pairs[name].shape == shapes.get(half)


def unapplied_tensors(file: Path) -> list[str]:
    """Return entries that the library drops: differences of whole tensors, such as norms.

    Differences of zeros are not counted.
    """
    found = []
    with readable(file), safetensors.safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
        for name in sorted(name for name in names if name.endswith(_DIFFERENCES)):
            layer = name.rpartition(".")[0]
            # The bias of a pair's layer is applied, and so is the head, which has its own.
            is_head = layer.endswith("head.head") and f"{layer}.diff" in names
            has_pair = bool({f"{layer}.lora_down.weight", f"{layer}.lora_A.weight"} & names)
            is_applied = is_head or (has_pair and name.endswith(".diff_b"))
            if not is_applied and opened.get_tensor(name).any():
                found.append(name)
    return found


def _from_hunyuan(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return tensors with the library's names; the second matrix is multiplied by alpha / rank."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("diffusion_model.")
        plain = plain.replace(".lora_down.", ".lora_A.").replace(".lora_up.", ".lora_B.")
        layer, _, part = plain.rpartition(".lora_" if "lora_" in plain else ".")
        layers.setdefault(layer, {})[part] = tensor
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    for layer, parts in layers.items():
        target = layer
        for pattern, replacement in _HUNYUAN:
            target = re.sub(pattern, replacement, target)
        matrices = {"A.weight", "B.weight"}
        if target == layer or not matrices <= parts.keys() <= matrices | {"alpha"}:
            unknown.append(layer)
            continue
        down_RI, up_OR = parts["A.weight"], parts["B.weight"]
        if "alpha" in parts:
            up_OR = up_OR * (parts["alpha"].item() / down_RI.shape[0])
        # Three layers of the refiner are one layer here.
        stem, is_three, _ = target.partition("to_qkv")
        names = [f"{stem}to_{each}" for each in "qkv"] if is_three else [target]
        for name, up in zip(names, up_OR.chunk(len(names)), strict=False):
            found[f"{PREFIX}{name}{DOWN}"], found[f"{PREFIX}{name}{UP}"] = down_RI, up.contiguous()
    if unknown:
        why = f"the transformer has no layer for {len(unknown)} of its {len(layers)} pairs"
        raise _misfit(file, unknown, why)
    return found


def _misfit(file: Path, names: Sequence[str], why: str) -> CheckpointError:
    first = f", such as {', '.join(sorted(names)[:3])}" if names else ""
    return CheckpointError(
        f"the LoRA {file.name} does not fit: {why}{first}",
        where=file,
        hint=_HINT,
        code="lora.no-match",
    )
