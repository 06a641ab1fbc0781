"""Load a checkpoint's components: every tensor and no other, safetensors only.

Names and shapes are checked from the files' headers before a byte of weight is read. The libraries
then load with their own concrete classes, never an Auto class, so nothing that a checkpoint names
(`auto_map`) is imported.
"""

import importlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin

import torch
from diffusers.utils import logging as diffusers_logging
from pydantic import ConfigDict, Field, FiniteFloat, PositiveFloat, TypeAdapter, ValidationError
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging as transformers_logging

from hyimg_cli.errors import HyimgError, MachineError, require, required
from hyimg_cli.kernels.offload import Offload
from hyimg_cli.loading.checkpoint import (
    TensorInfo,
    check_tensors,
    fault,
    refuse_special,
    without_few_eights,
)
from hyimg_cli.loading.readers import aligned
from hyimg_cli.loading.unfilled import refuse_unfilled
from hyimg_cli.models.common.config import MODULES, MOST_WIDTH, Config
from hyimg_cli.models.common.tokenizer import refuse_beyond
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout, Component
from hyimg_cli.models.diffusers_video.single_weights import is_packed, network_of_file
from hyimg_cli.models.diffusers_video.spellings import spelled_headers
from hyimg_cli.models.diffusers_video.tokenizers import refuse_unreadable
from hyimg_cli.parallel.devices import device_of
from hyimg_cli.settings.run import ModelChoice, Offloading

# Modules that may be built without counting tensors.
_FEW = 500
# Configuration keys that are widths of tensors. An attention window is not one: -1 means none.
_WIDTHS = re.compile(r"(?<!attn_)(size|dim|dims|channels|heads|d_model|d_ff|d_kv)$")
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)
_Three = Field(min_length=3, max_length=3)
# Files that transformers reads unchecked: of tokenizers, and of picture processors.
_OF_TOKENIZERS: dict[str, Any] = {"model_max_length": PositiveFloat | None}
_OF_PICTURES: dict[str, Any] = {
    "image_mean": Annotated[list[FiniteFloat], _Three],
    "image_std": Annotated[list[PositiveFloat], _Three],
    "rescale_factor": Annotated[float, Field(gt=0, le=1)],
    "resample": Literal[0, 1, 2, 3, 4, 5],
    **dict.fromkeys(("size", "crop_size"), dict[str, Annotated[int, Field(gt=0, le=8192)]] | None),
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_center_crop"), bool),
}
# Parts with a tokenizer and a processor of pictures; and those that are configurations alone.
_OF_TEXTS_AND_PICTURES = {"processor", "text_processor"}
_SAMPLERS = {"scheduler", "guider"}
_READ = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_Count = Annotated[int, Field(gt=0, le=64)]
# Of modules that cut pictures into patches: a size is a number of pixels.
_OF_PATCHES: dict[str, Any] = _OF_PICTURES | {
    **dict.fromkeys(("patch_size", "temporal_patch_size", "merge_size"), _Count),
    **dict.fromkeys(("min_pixels", "max_pixels"), Annotated[int, Field(gt=0)] | None),
    "size": dict[str, Annotated[int, Field(gt=0, le=1 << 30)]] | None,
}


@dataclass(frozen=True)
class LoadTarget:
    """Where networks work, in which precision, and which of them are on the device at a time."""

    # Keeps the networks that leave the device; with "none" those that leave it later.
    offload: Offload
    dtype: torch.dtype
    cpu_offload: Offloading = "none"

    @property
    def device(self) -> torch.device:
        return self.offload.device

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def in_float32(self) -> "LoadTarget":
        """Return the same place for a network that is always float32."""
        return replace(self, dtype=torch.float32)

    def put(self, network: nn.Module) -> None:
        """Put a network that has been read on the device, or keep it in main memory."""
        if self.cpu_offload == "none":
            network.to(self.device)
        else:
            self.offload.keep(network, blocks_of(network) if self.cpu_offload == "group" else ())


def load_target(choice: ModelChoice) -> LoadTarget:
    """Return the requested device and dtype. Raises MachineError if there is no such GPU."""
    if choice.device == "balanced":
        raise MachineError(
            "a video model runs on one GPU, and --device balanced names several",
            hint="use --device cuda:0; for more GPUs add --vae-patch-parallel-size",
            code="machine.device",
        )
    device = torch.device(device_of(choice))
    dtype: torch.dtype = getattr(torch, choice.dtype_on(device.type))
    return LoadTarget(Offload(device), dtype, choice.cpu_offload)


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformer or text encoder; empty for other networks.

    Of blocks inside a block only the outer one.
    """
    of_texts = "_no_split_modules" if isinstance(network, PreTrainedModel) else ""
    kinds = getattr(network, of_texts or "_repeated_blocks", None) or ()
    lists = (one for one in network.modules() if isinstance(one, nn.ModuleList))
    found = [block for one in lists for block in one if type(block).__name__ in kinds]
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]


def check_weights(component: Component) -> int:
    """Return a component's parameter count. Raises CheckpointError for faulty files."""
    cls, file = component_class(component), component.weights
    # Without tensors that, by the library, its class leaves in the file.
    ignored = getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
    stored = component.tensors()
    kept = {n: stored[n] for n in stored if not any(re.search(one, n) for one in ignored)}
    # Even without memory for weights, unused modules take time to build.
    _refuse_many(component.config(), max(len(kept), _FEW))
    module = empty_module(component)
    # Released files may have names from earlier versions of the library's class.
    is_of_texts = component.library == "transformers"
    renamings = get_model_conversion_mapping(module) if is_of_texts else ()
    found = {_renamed(name, renamings): tensor for name, tensor in kept.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    tied = getattr(module, "_tied_weights_keys", None)
    for copy, source in tied.items() if isinstance(tied, dict) else ():
        # One tensor with two names, stored once or twice: either is the whole weight.
        if copy in expected and source in expected and (copy in found) != (source in found):
            expected.pop(copy if source in found else source)
    if file is not None:
        if is_packed(stored):
            require("gguf", extra="gguf")
        found = spelled_headers(kept, expected.keys(), component.class_name, file.path)
        hint = "give --components of the model that the file was made from"
        check_tensors(found, expected, file.path, file.path.name, any_dtype=found, hint=hint)
        refuse_unfilled(file.path.parent, stored, component.name)
        return sum(parameter.numel() for parameter in module.parameters())
    # Tables of positions are whole numbers.
    whole = {name for name, one in module.state_dict().items() if not one.dtype.is_floating_point}
    free = whole | (found.keys() - without_few_eights(found).keys())
    check_tensors(found, expected, component.folder, component.name, any_dtype=free)
    refuse_unfilled(component.folder, stored, component.name)
    return sum(parameter.numel() for parameter in module.parameters())


def named_headers(component: Component) -> dict[str, TensorInfo]:
    """Return the headers of a component's weights by the names of its class.

    Raises CheckpointError.
    """
    stored, file = component.tensors(), component.weights
    if file is None:
        return stored
    expected = empty_module(component).state_dict().keys()
    return spelled_headers(stored, expected, component.class_name, file.path)


def check_all(layout: CheckpointLayout) -> int:
    """Check the weights of all parts, and values of others; return their number of parameters."""
    for name in layout.components.keys() & _SAMPLERS:
        check_arguments(layout.components[name].config(), component_class(layout.components[name]))
    return sum(check_weights(part) for part in layout.components.values() if part.has_weights)


def check_readers(layout: CheckpointLayout) -> None:
    """Raise CheckpointError for a tokenizer or processor that a run could not read."""
    for name, part in layout.components.items():
        if not part.has_weights and name not in _SAMPLERS:
            load_tokenizer(part, text_encoder_of(layout, name))


def text_encoder_of(layout: CheckpointLayout, name: str) -> Component | None:
    """Return the encoder of a tokenizer's or processor's texts; None for other parts."""
    if name in _OF_TEXTS_AND_PICTURES:
        return layout.components["text_encoder"]
    if not name.startswith("tokenizer"):
        return None
    return layout.components[name.replace("tokenizer", "text_encoder")]


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for one in renamings:
        name, _ = one.rename_source_key(name)
    return name


def _refuse_many(own: Config, most_modules: int) -> None:
    """Raise CheckpointError for numbers of modules or widths too large to be built."""
    for name, value in own.values.items():
        if isinstance(value, dict):
            _refuse_many(own.table(name), most_modules)
        most = most_modules if MODULES.search(name) else MOST_WIDTH if _WIDTHS.search(name) else 0
        for number in value if isinstance(value, list) else [value]:
            if most and isinstance(number, int | float) and not 0 <= number <= most:
                raise own.fault(name, number, f"0 to {most:,}")


def load_weights(
    component: Component,
    place: LoadTarget,
    *,
    prepare: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:
    """Return a component ready for inference, on its device or offloaded by `place`.

    `prepare` runs first; `options` go to the library. Tensors that its class keeps in float32 stay
    so. Raises CheckpointError, or torch.OutOfMemoryError.
    """
    # Networks that take turns make room on the device for this one.
    place.offload.unload()
    refuse_special(component.folder)
    cls: Any = component_class(component)
    if component.weights is not None:
        module, report = network_of_file(component, cls, place.dtype, **options)
    else:
        module, report = cls.from_pretrained(
            component.folder,
            dtype=place.dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            names = ", ".join(str(name) for name in list(report[kind])[:5])
            what = f"the {component.name} has {kind.replace('_', ' ')}: {names}"
            raise fault("not-strict", what, component.folder)
    if component.name == "vae" and not all(one.isfinite().all() for one in module.parameters()):
        # Latents are checked after each job, but pixels hide a NaN.
        what, hint = "the vae has weights that are not finite", "download the file again"
        raise fault("not-finite", what, component.folder, hint)
    if place.device.type == "cpu":
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = aligned(tensor.data)
    if prepare is not None:
        prepare(module)
    place.put(module)
    module.requires_grad_(False)
    module.eval()
    return module


def load_tokenizer(component: Component, encoder: Component | None) -> Any:
    """Return a tokenizer with a row in `encoder` for each token, or a processor of pictures."""
    refuse_special(component.folder)
    cls: Any = component_class(component)
    own = [Config.read(component.folder / name, is_optional=True) for name in _READ]
    check_values(own[0], _OF_TOKENIZERS)
    for one in (own[1], own[2].table("image_processor", {})):
        check_values(one, _OF_PATCHES if one.has("patch_size") else _OF_PICTURES)
    refuse_unreadable(component)
    with _described(component, "tokenizer"):
        tokenizer = cls.from_pretrained(component.folder, local_files_only=True)
    if encoder is not None:
        own_config = encoder.config()
        texts = own_config.table("text_config", own_config.values)
        rows = texts.count("vocab_size", own_config.count("vocab_size", 1 << 24))
        ids = getattr(tokenizer, "tokenizer", tokenizer).get_vocab().values()
        refuse_beyond(rows, ids, encoder.folder.parent, encoder.name)
    return tokenizer


def configured(component: Component, **changes: Any) -> Any:
    """Return a scheduler or guider from its configuration file, with `changes` to it."""
    cls: Any = component_class(component)
    own = component.config()
    check_arguments(own, cls)
    with _described(component):
        return cls.from_config({**own.values, **changes})


def check_arguments(own: Config, cls: Any) -> None:
    """Raise CheckpointError for a value of a type that the class's constructor does not declare."""
    every = inspect.signature(cls.__init__, eval_str=True).parameters.values()
    parameters = [one for one in every if one.annotation is not one.empty]
    kinds = {one.name: one.annotation for one in parameters if one.name in own.values}
    defaults = [one.name for one in parameters if own.values.get(one.name) == one.default]
    check_values(own, {name: kinds[name] for name in kinds.keys() - defaults})


def check_values(own: Config, kinds: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a value of the wrong type."""
    for name, kind in kinds.items():
        if get_origin(kind) is tuple:  # `tuple[int]` is used for any number of them
            kind = list[get_args(kind)[0]]  # type: ignore[misc]
        try:
            if name in own.values:
                data = json.dumps(own.values[name])
                TypeAdapter(kind, config=_ANY_CLASS).validate_json(data, strict=True)
        except ValidationError as error:
            raise own.fault(name, own.values[name], required(error.errors()[0]["msg"])) from None


def component_class(component: Component) -> type[Any]:
    """Return the library's class; `layout` has checked that it is a known one."""
    cls: type[Any] = getattr(importlib.import_module(component.library), component.class_name)
    return cls


def empty_module(component: Component) -> Any:
    """Return the module without memory for its weights."""
    refuse_special(component.folder)
    cls: Any = component_class(component)
    own = component.config()
    if component.library == "diffusers":
        check_arguments(own, cls)
        with _described(component), torch.device("meta"):
            return cls.from_config(own.values)
    # Values that transformers accepts but cannot compute with.
    for one in (own, own.table("text_config", {}), own.table("vision_config", {})):
        one.text("model_type", "")
        rope = one.table("rope_parameters" if one.has("rope_parameters") else "rope_scaling", {})
        if "mrope_section" in rope.values:
            heads = one.count("num_attention_heads")
            # Some have heads of another width than a share of the hidden one.
            half = one.count("head_dim", one.count("hidden_size") // heads) // 2
            if sum(sections := rope.counts("mrope_section")) != half:
                raise rope.fault("mrope_section", sections, f"numbers that add up to {half}")
    with _described(component):
        config = cls.config_class.from_pretrained(component.folder, local_files_only=True)
        with torch.device("meta"):
            return cls(config)


@contextmanager
def _described(component: Component, name: str = "config") -> Iterator[None]:
    """Raise CheckpointError if a library cannot make a component of its files."""
    try:
        yield
    except (HyimgError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        what = f"the files of {component.name} do not describe a {component.class_name}: {said}"
        raise fault(name, what, component.folder) from error


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for warnings that the libraries give for every released checkpoint.

    That guiders, attention backends and parallelism are experimental; and what the result line
    records: that texts are cut, and options unknown.
    """
    return not any(text in record.getMessage() for text in _EXPECTED)


_EXPECTED = (
    "Guiders are currently an experimental feature",
    "Attention backends are an experimental feature",
    "`enable_parallelism` is an experimental feature",
    # `CheckpointLayout.notes` names them.
    "but are not expected and will be ignored",
    "The following part of your input was truncated",
    # diffusers' FLUX.2-dev gives the length of its texts so.
    "Kwargs passed to `processor.__call__` have to be in `processor_kwargs`",
    "Token indices sequence length is longer",
)
# Stderr belongs to the caller's progress.
transformers_logging.disable_progress_bar()
diffusers_logging.disable_progress_bar()
for _name in (
    "diffusers.guiders.guider_utils",
    "diffusers.configuration_utils",
    "diffusers.models.modeling_utils",
    "diffusers.modular_pipelines.flux.encoders",
    "transformers.processing_utils",
    "transformers.tokenization_utils_base",
):
    logging.getLogger(_name).addFilter(_is_news)
