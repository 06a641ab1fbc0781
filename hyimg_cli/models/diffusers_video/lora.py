"""LoRA files as layers next to a checkpoint's weights, which stay unchanged.

So a job without a LoRA has the bits of a run without any. A pair that fits no layer is an error;
the library would only log it. Local files are compared with the checkpoint's headers before a run,
by the same code (`lora_pairs`).
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hyimg_cli.errors import CheckpointError, HyimgError, JobError, require
from hyimg_cli.loading.hub import cached_file
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout, Component
from hyimg_cli.models.diffusers_video.lora_pairs import PREFIX, LoraPairs, misfit, read_pairs
from hyimg_cli.models.lora_files import lora_file
from hyimg_cli.settings.paths import is_hub_file
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.options import Lora


def check_loras(job: Job, layout: CheckpointLayout) -> None:
    """Raise JobError for LoRAs that do not fit the checkpoint; missing files pass."""
    for found in _examined_loras(job, layout):
        if isinstance(found, CheckpointError):
            raise JobError(found.what, where="lora", hint=found.hint, code="job.lora-no-match")


def lora_notes(job: Job, layout: CheckpointLayout) -> tuple[str, ...]:
    """Return a warning for each of the job's LoRAs that is applied without some of its tensors."""
    return tuple(
        found for found in _examined_loras(job, layout) if isinstance(found, str) and found
    )


def _examined_loras(job: Job, layout: CheckpointLayout) -> Iterator[CheckpointError | str]:
    for lora in job.lora:
        path, part = Path(lora.file).expanduser(), _component(lora, layout)
        if lora.file and not path.is_file():
            path = cached_file(lora.file) or path if is_hub_file(lora.file) else path
        if lora.file and path.is_file() and part is not None:
            yield _examined(path, path.stat().st_mtime_ns, part, layout.family)


@lru_cache(maxsize=64)
def _examined(path: Path, _changed: int, part: Component, family: str) -> CheckpointError | str:
    """Return why a file fits no layer, or what is not applied of it; empty if all of it is.

    Empty, too, if the checkpoint's weights come later.
    """
    if not part.known_tensors():
        return ""
    try:
        lost = read_pairs(path, part, family).unapplied
    except CheckpointError as error:
        if error.code == "lora.no-match":
            return error
        return misfit(path, error.what, hint=error.hint)
    if not lost:
        return ""
    said = f"the LoRA {path.name} was applied without {len(lost)} of its tensors, which diffusers "
    return f"{said}does not support, such as {lost[0]}"


def _component(lora: Lora, layout: CheckpointLayout) -> Component | None:
    return layout.components.get("transformer_2" if lora.on == "low" else "transformer")


class Adapters:
    """The LoRAs that are applied to some transformers, for one job at a time."""

    def __init__(
        self,
        networks: Sequence[Any],
        layout: CheckpointLayout,
        unload: Callable[[], object] = int,
    ) -> None:
        """Start without LoRAs. `networks`: the transformer, or the high-noise and low-noise ones.

        `unload` moves their weights to main memory before layers change.
        """
        self._networks, self._layout, self._unload = networks, layout, unload
        self._now: tuple[Lora, ...] = ()

    def use(self, loras: tuple[Lora, ...]) -> None:
        """Apply these LoRAs and no others. Raises CheckpointError if one does not fit."""
        if loras == self._now:
            return
        self._unload()
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
        found = read_pairs(file, part, self._layout.family, network)
        try:
            with warnings.catch_warnings():
                # The warning that an adapter already exists, which is intended.
                warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
                network.load_lora_adapter(
                    found.pairs, adapter_name=name, prefix="transformer", **found.options
                )
            _widen(network, name, found)
        except (HyimgError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # PEFT's own
            raise misfit(file, f"PEFT cannot apply it ({' '.join(str(error).split())})") from error
        network.requires_grad_(False)
        network.eval()


def _widen(network: Any, name: str, found: LoraPairs) -> None:
    """Give matrices the values in their file where layers have 8 bits or are packed by GGUF.

    peft gives them the dtype of their layer's weight: 8 bits would round them, and have no
    products; the bytes of GGUF are no numbers, so they would stay wide.
    """
    for key, tensor in found.pairs.items():
        layer, _, matrix = key.removeprefix(PREFIX).rpartition(".lora_")
        side, _, kind = matrix.partition(".")
        module = network.get_submodule(layer)
        held = getattr(getattr(module, f"lora_{side}")[name], kind)
        is_packed = hasattr(module.base_layer.weight, "quant_type")
        if is_packed or (held.dtype.is_floating_point and held.dtype.itemsize == 1):
            held.data = tensor.to(held.device, network.dtype)
