"""Read a LoRA file: pairs of matrices by the library's names, and what is said of their strength.

    transformer.blocks.0.attn1.to_q.lora_A.weight             the library's names
    diffusion_model.blocks.0.self_attn.q.lora_down.weight     Wan's own, with alpha
    lora_unet_blocks_0_self_attn_q.lora_down.weight           musubi's and kohya's
    diffusion_model.double_blocks.0.img_attn_q...             HunyuanVideo's own; converted here

The library's loader of the checkpoint's pipeline converts names. Some of its converters drop
entries silently; `_Traced` shows from which of the file's tensors each result was made, so every
tensor is applied, zero, or listed. The strength of a pair is alpha / rank: alpha is a tensor, or in
the header's `lora_adapter_metadata`. Where else it may be said, the library does not read it; then
the file is refused if its strength would be another.
"""

# Legend: R rank, I O values in and out of a layer
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.errors import CheckpointError, HyimgError
from hyimg_cli.files import TABLE_BYTES, json_of, text_of
from hyimg_cli.loading.checkpoint import TensorInfo, file_metadata, open_tensors
from hyimg_cli.models.diffusers_video.layout import HUNYUAN_VIDEO15, WAN, Component
from hyimg_cli.models.diffusers_video.weights import named_headers
from hyimg_cli.models.lora_files import CONFIG

# PEFT imports bitsandbytes where it is installed, which warns of a kernel that LoRAs do not use;
# and the converters warn of names, which are in our own messages.
for _name in ("bitsandbytes.backends.cpu.ops", "diffusers.loaders.lora_conversion_utils"):
    logging.getLogger(_name).setLevel(logging.ERROR)
PREFIX = "transformer."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
_BIAS = ".lora_B.bias"
_METADATA = "lora_adapter_metadata"
_HINT = "use a LoRA made for this model"
# Adapters of other kinds, by a part of their tensors' names.
_OTHER_KINDS = {
    "lokr_": "a LoKr",
    "hada_": "a LoHa",
    "oft_": "an OFT adapter",
    "lora_mid": "a LoCon with middle matrices",
    "dora_scale": "a DoRA (with DoRA scales)",
    "lora_magnitude_vector": "a DoRA (with DoRA scales)",
    "on_input": "an (IA)3 adapter",
}
_OF_PEFT = "base_model.model."
# Entries for text encoders: diffusers', kohya's.
_OF_TEXT = re.compile(r"text_encoders?(_\d)?\.|(lora_)?te\d?[._]")
# The last part of a header's key that gives alpha: lora_alpha, ss_network_alpha, ...
_ALPHA = re.compile(r"(?:^|[._])(?:lora|network)_alpha$")
_RANK_STABLE = re.compile(r"(?:^|[._])use_rslora$")
_PATTERN = re.compile(r"(?:^|[._])alpha_pattern$")
_MOST_SAID = 120
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


@dataclass(frozen=True)
class LoraPairs:
    """A LoRA file as the library applies it.

    `pairs`: matrices by the library's names. `options`: of the library's `load_lora_adapter`.
    `unapplied`: the file's tensors, other than zeros, that have no part in `pairs`.
    """

    pairs: dict[str, Tensor]
    options: Mapping[str, Any]
    unapplied: tuple[str, ...]


def misfit(file: Path, why: str, names: Sequence[str] = (), hint: str = _HINT) -> CheckpointError:
    """Return the error for a LoRA that cannot be applied; `names`: entries that show it."""
    first = f", such as {', '.join(sorted(names)[:3])}" if names else ""
    what = f"the LoRA {file.name} does not fit: {why}{first}"
    return CheckpointError(what, where=file, hint=hint, code="lora.no-match")


def read_pairs(file: Path, part: Component, family: str, network: Any = None) -> LoraPairs:
    """Return a file's pairs, each of which fits a layer of `part`.

    `network`: adds zeros for its layers that a file for text-to-video lacks. Raises CheckpointError
    for a file that cannot be applied as it says.
    """
    with open_tensors(file) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    _refuse_kinds(tensors, file)
    tensors = _numbers_of(tensors, file)
    metadata = _metadata_of(file)
    made = _convert(tensors, _converter(family, file), file)
    _refuse_strays(made, part, file)
    config = None if metadata is None else _config_of(metadata, made, file)
    _refuse_lost_alpha(made, config, file)
    pairs = made.pairs
    if network is not None and family == WAN:
        pairs = _library(family)._maybe_expand_t2v_lora_for_i2v(network, pairs)
    return LoraPairs(
        pairs,
        {"metadata": metadata, "network_alphas": made.alphas},
        tuple(name for name in sorted(tensors.keys() - made.used) if tensors[name].any()),
    )


@dataclass(frozen=True)
class _Converted:
    """`pairs` and separate `alphas` by the library's names; `origins`: the file's names for each.

    `used`: the file's entries that have a part in them. `own_alphas`: the file's alpha tensors.
    """

    pairs: dict[str, Tensor]
    alphas: dict[str, Tensor]
    origins: Mapping[str, frozenset[str]]
    used: frozenset[str]
    own_alphas: Mapping[str, float]

    def layers(self) -> Iterator[tuple[str, int, bool]]:
        """Yield each layer with its rank, and whether the file has a tensor for its alpha."""
        for name, down_RI in self.pairs.items():
            layer = name.removeprefix(PREFIX).removesuffix(DOWN)
            if name.endswith(DOWN):
                stems = {re.split(r"\.lora_|\.(?:down|up)\.", one)[0] for one in self.origins[name]}
                is_said = f"{PREFIX}{layer}.alpha" in self.alphas
                is_said |= any(f"{stem}.alpha" in self.own_alphas for stem in stems)
                yield layer, len(down_RI), is_said


# A number that is read has a part in the result.
_READ_AS_NUMBER = (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.tolist)


class _Traced(Tensor):
    """A tensor that remembers from which of a file's tensors it was made."""

    origins: frozenset[str] = frozenset()
    # Entries of the file that were read as numbers; None in tensors made of entries.
    read: set[str] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        sources = [one for one in _flat((args, kwargs or {})) if isinstance(one, _Traced)]
        origins = frozenset[str]().union(*(one.origins for one in sources))
        # Assignment to a part of a tensor returns nothing.
        results = [*_flat(made), *([args[0]] if func is Tensor.__setitem__ else [])]
        for result in results:
            if isinstance(result, Tensor):
                result.origins = origins  # type: ignore[attr-defined]
        if func in _READ_AS_NUMBER and sources[0].read is not None:
            sources[0].read.update(origins)
        return made


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _library(family: str) -> Any:
    import diffusers  # slow: it imports a pipeline's text encoder

    return getattr(diffusers, {WAN: "WanPipeline"}.get(family, family), None)


def _converter(family: str, file: Path) -> Callable[[dict[str, Tensor]], Any]:
    """Return the function that gives a file's tensors the library's names."""
    if family == HUNYUAN_VIDEO15:
        return lambda tensors: _from_hunyuan(tensors, file)
    own = getattr(_library(family), "lora_state_dict", None)
    # Pipelines without a loader: only the library's own names.
    return dict if own is None else lambda tensors: own(tensors, return_alphas=True)


def _convert(
    tensors: Mapping[str, Tensor], convert: Callable[[dict[str, Tensor]], Any], file: Path
) -> _Converted:
    read = set[str]()
    given = dict[str, Tensor]()
    for name, tensor in tensors.items():
        given[name] = tensor.as_subclass(_Traced)
        given[name].origins, given[name].read = frozenset({name}), read  # type: ignore[attr-defined]
    try:
        made = convert(given)
    except (HyimgError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # converters assert, index and reshape what they do not expect
        said = " ".join(str(error).split())
        # Of some messages, most is a list of all names in the file.
        said = f"{type(error).__name__}: {said}" if len(said) <= _MOST_SAID else "unknown names"
        why, hint = f"diffusers cannot convert its names ({said.removesuffix(': ')})", _HINT
        if any(name.startswith(_OF_PEFT) for name in tensors):
            why, hint = _of_peft()
        raise misfit(file, why, list(tensors), hint) from error
    # FLUX.1's loader leaves some alphas separate.
    traced, alphas = made if isinstance(made, tuple) else (made, None)
    pairs = {name: tensor.as_subclass(Tensor) for name, tensor in traced.items()}
    origins: dict[str, frozenset[str]] = {
        name: getattr(tensor, "origins", frozenset()) for name, tensor in traced.items()
    }
    kept = {
        name: tensor.as_subclass(Tensor)
        for name, tensor in (alphas or {}).items()
        if f"{name.removesuffix('.alpha')}{DOWN}" in pairs
    }
    used = read.union(*origins.values(), *(alphas[name].origins for name in kept))
    own = {name: float(one) for name, one in tensors.items() if name.endswith(".alpha")}
    return _Converted(pairs, kept, origins, frozenset(used), own)


def _of_peft() -> tuple[str, str]:
    hint = "load it with PEFT and save it with diffusers (save_lora_weights)"
    return f"its names are PEFT's own ({_OF_PEFT}*)", hint


def _refuse_kinds(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Raise CheckpointError for adapters that are not pairs of two matrices."""
    for mark, kind in _OTHER_KINDS.items():
        if found := [name for name in tensors if mark in name]:
            hint = "use a plain LoRA for this model, or merge the adapter into a copy of it"
            raise misfit(file, f"it is {kind}, which is not supported", found, hint)
    if not any("lora" in name or ".down." in name for name in tensors):
        raise misfit(file, "it has no pairs of LoRA matrices", list(tensors))


def _numbers_of(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return the tensors as converters can compute with them: 8-bit floats have no products.

    Raises CheckpointError for tensors that are no weights: empty, integers, or not finite.
    """
    found = {name: one.float() if one.dtype.itemsize == 1 else one for name, one in tensors.items()}
    for why, names in (
        (
            "some of its tensors are empty",
            [name for name, one in found.items() if not len(one.flatten())],
        ),
        (
            "some of its tensors are integers, which are not read",
            [
                name
                for name, one in tensors.items()
                if not one.is_floating_point() and not name.endswith(".alpha")
            ],
        ),
        (
            "some of its tensors are not finite",
            [name for name, one in found.items() if not one.isfinite().all()],
        ),
    ):
        if names:
            raise misfit(file, why, names, "download it again, or use another file of this LoRA")
    return found


def _refuse_strays(made: _Converted, part: Component, file: Path) -> None:
    """Raise CheckpointError for a converted entry without a layer, a shape or its other half."""
    layers, pairs = named_headers(part), made.pairs
    wrong = [name for name in pairs if not _is_fitting(name, pairs, layers)]
    if not wrong and pairs:
        return
    # By the file's own names, if they are known.
    names = sorted(set[str]().union(*(made.origins[name] or {name} for name in wrong)))
    if not pairs:
        with open_tensors(file, "np") as opened:
            raise misfit(file, "none of its names belongs to a layer", list(opened.keys()))
    if any(name.startswith(_OF_PEFT) for name in names):
        why, hint = _of_peft()
        raise misfit(file, why, names, hint)
    halves = {DOWN: UP, UP: DOWN}
    for name in wrong:
        half = next((one for one in halves if name.endswith(one)), "")
        other = f"{name.removesuffix(half)}{halves[half]}" if half else name
        if half and other not in pairs:
            layer = f"{name.removeprefix(PREFIX).removesuffix(half)}.weight"
            if layer in layers:
                missing = halves[half].removesuffix(".weight").removeprefix(".")
                why = f"{missing}, the other half of a pair, is missing"
                raise misfit(file, why, sorted(made.origins[name] or {name}))
    some = f"{len(wrong)} of its {len(pairs)} entries"
    if texts := [name for name in names if _OF_TEXT.match(name)]:
        why = f"it changes a text encoder, too ({len(texts)} entries), which is not supported"
        raise misfit(
            file, why, texts, "remove these entries, or use a LoRA for the transformer alone"
        )
    stems = [name.removeprefix(PREFIX).partition(".lora")[0] for name in wrong]
    is_named = all(name.startswith(PREFIX) and name.endswith((DOWN, UP, _BIAS)) for name in wrong)
    # One part before the name: unet., module.
    if not is_named and all(
        {f"{stem}.weight", f"{stem.partition('.')[2]}.weight"} & layers.keys() for stem in stems
    ):
        hint = f"rename them as {PREFIX}LAYER{DOWN}, or save it with diffusers (save_lora_weights)"
        raise misfit(file, f"diffusers does not read the names of {some}", names, hint)
    if all(f"{stem}.weight" in layers for stem in stems):
        raise misfit(file, f"{part.name} has layers of other shapes for {some}", names)
    raise misfit(file, f"{part.name} has no layer for {some}", names)


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


def _metadata_of(file: Path) -> dict[str, Any] | None:
    """Return the configuration in a file's header that the library reads."""
    said = file_metadata(file).get(_METADATA)
    try:
        metadata = None if said is None else json_of(said)
    except ValueError as error:
        raise misfit(file, f"its metadata is not JSON ({error})") from None
    if metadata is not None and not isinstance(metadata, dict):
        raise misfit(file, f"{_METADATA} in its header is not an object")
    return metadata


def _config_of(metadata: Mapping[str, Any], made: _Converted, file: Path) -> Mapping[str, Any]:
    """Return the values for the transformer, which fit the pairs' ranks and are said once."""
    own = {k.removeprefix(PREFIX): v for k, v in metadata.items() if k.startswith(PREFIX)}
    if find_spec("peft"):
        from peft import LoraConfig
        from peft.tuners.tuners_utils import check_target_module_exists as is_target

        names = own.get("target_modules")
        try:
            config = LoraConfig(**own)
            # PEFT cannot apply "all-linear" to a transformer of diffusers.
            left = [one for one, *_ in made.layers() if not (names and is_target(config, one))]
        except Exception as error:  # it checks types and combinations in its own ways
            why = f"{_METADATA} in its header does not describe a LoRA ({error})"
            raise misfit(file, why) from error
        if left:
            what = f"{_METADATA} in its header does not name its layers (target_modules)"
            raise misfit(file, what, left)
    wrong, twice = [], []
    for layer, rank, has_alpha in made.layers():
        if _of_layer(own.get("rank_pattern"), layer, own.get("r", 8)) != rank:
            wrong.append(layer)
        if has_alpha and not math.isclose(_scale(own, layer, rank), 1):
            twice.append(layer)
    if wrong:
        raise misfit(file, f"{_METADATA} in its header has other ranks than its matrices", wrong)
    if twice:
        why = f"its alpha is in tensors and in {_METADATA} of its header"
        raise misfit(file, why, twice, "remove one of them")
    if any(name.endswith(".bias") for name in made.pairs) and not own.get("lora_bias"):
        why = f"it has biases, and {_METADATA} in its header says that it has none (lora_bias)"
        raise misfit(file, why, [name for name in made.pairs if name.endswith(".bias")])
    return own


def _of_layer(pattern: Any, layer: str, otherwise: Any) -> Any:
    """Return a layer's value in one of PEFT's patterns, whose keys are ends of layers' names."""
    for key, value in pattern.items() if isinstance(pattern, dict) else ():
        if re.match(rf"(.*\.)?({key})$", layer):
            return value
    return otherwise


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the strength of a layer's pair by a configuration in PEFT's keys."""
    alpha = float(_of_layer(config.get("alpha_pattern"), layer, config.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _refuse_lost_alpha(made: _Converted, config: Mapping[str, Any] | None, file: Path) -> None:
    """Raise CheckpointError for an alpha that is said where the library does not read it.

    Unless it is what the library applies anyway. Tensors take precedence, as in kohya's own loader.
    """
    for where, said in _unread_configs(file):
        for layer, rank, has_alpha in made.layers():
            applied = 1.0 if config is None else _scale(config, layer, rank)
            asked = _scale(said, layer, rank)
            if not has_alpha and not math.isclose(asked, applied, rel_tol=1e-4):
                why = f"{where} asks for a strength of {asked:g} (alpha "
                why += f"{_of_layer(said.get('alpha_pattern'), layer, said['lora_alpha'])}, rank "
                why += f"{rank}), and diffusers, which does not read it, applies {applied:g}"
                hint = f"save it with diffusers, or remove that value and write FILE@{asked:g}"
                raise misfit(file, why, [layer], hint)


def _unread_configs(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where a file's alpha is said, and the values there, by PEFT's names of keys."""
    header = {key: one for key, one in file_metadata(file).items() if key != _METADATA}
    tables: list[tuple[str, Mapping[str, Any]]] = [("its header", header)]
    for key, one in header.items():
        if one.lstrip().startswith("{"):
            tables.append((f"{key} in its header", _object_of(one)))
    beside = file.parent / CONFIG
    if beside.is_file():
        try:
            tables.append((f"{beside.name} beside it", _object_of(text_of(beside, TABLE_BYTES))))
        except (OSError, ValueError):
            raise misfit(file, f"{beside.name} beside it cannot be read") from None
    for where, table in tables:
        stable = next((one for key, one in table.items() if _RANK_STABLE.search(key)), False)
        patterns: Any = next((one for key, one in table.items() if _PATTERN.search(key)), {})
        if isinstance(patterns, str):
            patterns = _object_of(patterns)
        for key, one in table.items():
            alpha = _number_of(one) if _ALPHA.search(key) else None
            if alpha is not None:
                is_stable = str(stable).lower() == "true"
                own = {"lora_alpha": alpha, "use_rslora": is_stable, "alpha_pattern": patterns}
                yield f"{key} in {where}" if where != key else where, own


def _object_of(text: str) -> Mapping[str, Any]:
    try:
        value = json_of(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _number_of(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None  # kohya writes None
    return number if math.isfinite(number) else None


def _from_hunyuan(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return tensors with the library's names; the second matrix is multiplied by alpha / rank."""
    if all(name.startswith(PREFIX) and not name.endswith(".alpha") for name in tensors):
        return dict(tensors)
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
        raise misfit(file, why, unknown)
    return found
