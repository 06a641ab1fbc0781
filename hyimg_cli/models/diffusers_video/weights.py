"""Components of a checkpoint as modules: every tensor, no other, safetensors only, no code of its
own.

Names and shapes are checked from the files' headers before a byte of weight is read. The libraries
then load by their own concrete classes, never by an Auto class, so nothing that a checkpoint names
(`auto_map`) is looked at.
"""

import importlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from torch import nn
from transformers.utils import logging as transformers_logging

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.checkpoint import (
    TensorInfo,
    check_against,
    refuse_many,
    refuse_special,
    tensor_index,
)
from hyimg_cli.models.diffusers_video.layout import Component
from hyimg_cli.models.diffusers_video.offload import Offload

# Modules that may be built without looking how many tensors there are.
_FEW = 500


@dataclass(frozen=True)
class LoadTarget:
    """Where networks work, in which precision, and which of them are there at a time."""

    device: torch.device
    dtype: torch.dtype
    # None: every network goes to the device when it is read, and stays.
    offload: Offload | None = None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def in_float32(self) -> "LoadTarget":
        """The same place for a network that is wide whatever the others are."""
        return replace(self, dtype=torch.float32)

    def bring(self, network: nn.Module) -> None:
        """Have a network on the device; called before each of its forwards."""
        if self.offload is not None:
            self.offload.bring(network)

    def release(self) -> None:
        """Free what on the device can be brought again."""
        if self.offload is not None:
            self.offload.release()


def check_weights(component: Component) -> int:
    """How many parameters a component's files hold. Raises CheckpointError where they are missing,
    broken, pickled, or not exactly what its configuration describes.
    """
    cls = component_class(component)
    found = _without_ignored(tensor_index(component.folder, component.stem), cls)
    # Even without memory for their weights, modules that are not there take their time to build.
    refuse_many(component.config().values, max(len(found), _FEW), component.folder / "config.json")
    with torch.device("meta"), quiet():
        module = _empty(cls, component)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for copy, source in _tied(module).items():
        # Stored once or twice: either is the whole weight.
        if copy in expected and source in expected and (copy in found) != (source in found):
            expected.pop(copy if source in found else source)
    try:
        check_against(found, expected)
    except CheckpointError as error:
        raise CheckpointError(
            f"{component.name}: {error.what}",
            where=component.folder,
            hint=error.hint,
            code=error.code,
        ) from None
    return sum(parameter.numel() for parameter in module.parameters())


def load_weights(
    component: Component,
    place: LoadTarget,
    *,
    prepare: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:
    """A component ready for inference, its files checked first: on its device, or in main memory
    where `place` brings it to its device for its work. `prepare` is done before; `options` are the
    library's.

    What its class keeps in float32 stays so. Raises CheckpointError, or torch.OutOfMemoryError.
    """
    check_weights(component)
    # Whoever takes turns on the device leaves it to this one.
    place.release()
    refuse_special(component.folder)
    cls: Any = component_class(component)
    with quiet():
        module, report = cls.from_pretrained(
            component.folder,
            dtype=place.dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    _refuse_leftovers(component, report)
    if prepare is not None:
        prepare(module)
    if place.offload is None:
        module = module.to(place.device)
    module.requires_grad_(False)
    module.eval()
    return module


def load_tokenizer(component: Component) -> Any:
    """A tokenizer from its own files."""
    refuse_special(component.folder)
    cls: Any = component_class(component)
    try:
        with quiet():
            return cls.from_pretrained(component.folder, local_files_only=True)
    except Exception as error:  # of the tokenizers library too, which raises no other
        raise CheckpointError(
            f"the {component.name} cannot be read: {error}",
            where=component.folder,
            hint="download the checkpoint again, with its small files",
            code="checkpoint.tokenizer",
        ) from error


def configured(component: Component, **changes: Any) -> Any:
    """A scheduler or guider from its configuration file, with `changes` to it."""
    cls: Any = component_class(component)
    config = {**component.config().values, **changes}
    try:
        with quiet():
            return cls.from_config(config)
    except Exception as error:
        raise CheckpointError(
            f"the {component.name}'s configuration cannot be used: {error}",
            where=component.folder,
            code="checkpoint.config",
        ) from error


def component_class(component: Component) -> type[Any]:
    """The library's class; `layout` has made sure that it is one that we know."""
    cls: type[Any] = getattr(importlib.import_module(component.library), component.class_name)
    return cls


def _empty(cls: Any, component: Component) -> nn.Module:
    """The module without memory for its weights."""
    refuse_special(component.folder)
    try:
        if component.library == "diffusers":
            module: nn.Module = cls.from_config(component.config().values)
        else:
            config = cls.config_class.from_pretrained(component.folder, local_files_only=True)
            module = cls(config)
    # The libraries build whatever numbers say, and fail in ways of their own.
    except Exception as error:
        raise CheckpointError(
            f"{component.name}/config.json does not describe a {component.class_name}: {error}",
            where=component.folder,
            code="checkpoint.config",
        ) from error
    return module


def _tied(module: nn.Module) -> dict[str, str]:
    """Names that share another name's tensor."""
    tied = getattr(module, "_tied_weights_keys", None)
    return dict(tied) if isinstance(tied, dict) else {}


def _without_ignored(found: dict[str, TensorInfo], cls: Any) -> dict[str, TensorInfo]:
    """Without tensors that the library itself says its class leaves in the file."""
    patterns = getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
    return {
        name: info
        for name, info in found.items()
        if not any(re.search(pattern, name) for pattern in patterns)
    }


def _refuse_leftovers(component: Component, report: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            names = ", ".join(str(name) for name in list(report[kind])[:5])
            raise CheckpointError(
                f"loading the {component.name} left {kind.replace('_', ' ')}: {names}",
                where=component.folder,
                code="checkpoint.not-strict",
            )


class _NotExpected(logging.Filter):
    """Lets everything pass but what would be said of every released checkpoint, at each load: that
    guiders, backends of attention and parallelism are experimental, and that the VAE of Wan 2.2 5B
    has a setting (`clip_output`) that the library does not read.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_known = text.startswith(_EXPERIMENTAL)
        return not (is_known or "{'clip_output': False} were passed to AutoencoderKLWan" in text)


_EXPERIMENTAL = (
    "Guiders are currently an experimental feature",
    "Attention backends are an experimental feature",
    "`enable_parallelism` is an experimental feature",
)
_NOT_EXPECTED = _NotExpected()
_CHATTY = (
    "diffusers.guiders.guider_utils",
    "diffusers.configuration_utils",
    "diffusers.models.modeling_utils",
)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of the libraries' own: stderr belongs to the caller's progress."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    for logger in loggers:
        logger.addFilter(_NOT_EXPECTED)
    bars = [
        library for library in (transformers_logging, diffusers_logging) if _shows_bars(library)
    ]
    for library in bars:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in bars:
            library.enable_progress_bar()
        for logger in loggers:
            logger.removeFilter(_NOT_EXPECTED)


def _shows_bars(library: Any) -> bool:
    shows: bool = library.is_progress_bar_enabled()
    return shows
