"""A released editor's way through the product on the fake GPU: what stages move and wait for.

Load, encode, three denoise steps and decode by the model's own methods. Weights have no numbers:
the libraries' classes are built from the configurations. The rest is the product's code and theirs.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import torch
import transformers
from fake_gpu.device import FakeGpu, fake_gpu
from fake_gpu.released_editors import CHECKPOINTS, write_released
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyimg_cli.journal.keys import source_digest
from hyimg_cli.memory.videos import needs_of
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_image.model import LatentImageModel
from hyimg_cli.models.diffusers_image.table import KINDS
from hyimg_cli.settings.run import MachineInfo, ModelChoice, Offloading, OutputConfig, RunConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling

SIDE, STEPS = 1024, 3
# Operations that start no kernel.
_VIEWS = {
    *("view", "reshape", "expand", "transpose", "permute", "detach", "alias", "slice", "select"),
    *("unsqueeze", "squeeze", "t", "split", "split_with_sizes", "chunk", "unbind", "as_strided"),
    *("_unsafe_view", "unflatten", "empty", "empty_like", "new_empty", "lift_fresh"),
    "empty_strided",
}


@dataclass
class Stage:
    """Bytes at the peak, bytes to and from the GPU, and host reads and waits by line of ours."""

    peak: int
    sent: int
    fetched: int
    reads: dict[str, int]
    waits: dict[str, int]
    strays: dict[str, int]


@dataclass
class Traced:
    """An editor's stages; `planned`: the plan's bytes by moment. Of its last step: operations that
    start a kernel, attention by its operation, and masks that it reads.
    """

    stages: dict[str, Stage] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    launches: int = 0
    attention: dict[str, int] = field(default_factory=dict)
    masks: int = 0
    blocks: int = 0
    block_bytes: int = 0


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.masks = 0, 0
        self.attention: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._schema.name.removeprefix("aten::")
        self.count += op.namespace == "aten" and name not in _VIEWS
        if name.startswith("_scaled_dot_product"):
            self.attention[name] += 1
            self.masks += "efficient" in name and args[3] is not None
            self.masks += name.endswith("math") and args[3] is not None
        return op(*args, **(kwargs or {}))


def traced(
    folder: Path, model: str, tiny: Callable[[str], Path], *, offload: Offloading = "none"
) -> Traced:
    """Run one job of a released editor, whose files are written into `folder` once."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.is_dir():
        write_released(checkpoint, model, tiny)
        Image.fromarray(np.zeros((SIDE, SIDE, 3), np.uint8)).save(folder / "source.png")
    edits = KINDS[CHECKPOINTS[model][0]].most > 0
    job = ImageJob(
        custom_id="a",
        task="it2i" if edits else "t2i",
        prompt="turn the day into night and keep everything else as it is",
        model=str(checkpoint),
        images=(str(folder / "source.png"),) if edits else (),
        seed=7,
        size=SizeRequest(SIDE, SIDE),
        text=TextSampling(),
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        flow_shift=1.0,
    )
    machine = MachineInfo(has_gpu=True, has_triton=True)
    choice = ModelChoice(
        str(checkpoint), dtype="bfloat16", device="cuda:0", cpu_offload=offload, machine=machine
    )
    card = registry.model_card(job.model)
    assert card.networks is not None
    needs = needs_of(job, card.networks, RunConfig(OutputConfig(folder), model=choice))
    made = Traced(planned={name: need.total for name, need in needs.items()})
    with fake_gpu() as gpu, _without_numbers():
        _run(gpu, choice, job, made)
        gc.collect()  # what is left is let go on the device that it is on
    return made


def _run(gpu: FakeGpu, choice: ModelChoice, job: ImageJob, made: Traced) -> None:
    def ended(name: str) -> None:
        facts = dict(gpu.reads), dict(gpu.waits), dict(gpu.strays)
        made.stages[name] = Stage(gpu.peak, gpu.sent, gpu.fetched, *facts)
        gpu.forget()

    model = registry.load_editor(choice)
    gpu.forget()
    digests = [source_digest(path) for path in job.images]
    known = {one: model.encoder.encode(one) for one in model.conditions(job, digests)}
    ended("encode")
    model.encoder.release()
    model.load_weights()
    ended("load")
    denoiser = model.denoiser(job, known)
    latents = denoiser.initial_latents()
    ended("begin")
    for index in range(denoiser.steps):
        with _Launches() as launches:
            latents = denoiser.step(index, latents)
        ended(f"step {index}")
    made.launches, made.attention = launches.count, dict(launches.attention)
    made.masks = launches.masks
    made.blocks, made.block_bytes = _blocks(model)
    model.decode_latents(job, latents)
    ended("decode")


def _blocks(model: LatentImageModel) -> tuple[int, int]:
    transformer = model.have("transformer")
    kinds = transformer._repeated_blocks
    lists = (one for one in transformer.modules() if isinstance(one, nn.ModuleList))
    found = [block for one in lists for block in one if type(block).__name__ in kinds]
    every = (one.nbytes for block in found for one in (*block.parameters(), *block.buffers()))
    return len(found), sum(every)


@contextmanager
def _without_numbers() -> Iterator[None]:
    """Classes of the libraries are built from configurations instead of read from files."""
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: 1),
        patch.object(diffusers.ModelMixin, "from_pretrained", classmethod(_built)),
        patch.object(transformers.PreTrainedModel, "from_pretrained", classmethod(_built)),
    ):
        yield


def _built(cls: Any, folder: Path, dtype: torch.dtype, **_: Any) -> tuple[Any, dict[str, Any]]:
    if issubclass(cls, diffusers.ModelMixin):
        module = cls.from_config(cls.load_config(folder))
    else:
        module = cls(cls.config_class.from_pretrained(folder))
    wide = getattr(module, "_keep_in_fp32_modules", None) or ()
    for name, parameter in module.named_parameters():
        is_wide = not set(wide).isdisjoint(name.split("."))
        parameter.data = parameter.data.to(torch.float32 if is_wide else dtype)
    return module, {}
