"""HunyuanImage-3 Instruct at its released size, with weights that are given shapes alone, and the
requests that run on it: 832x1216 from one source, 6,793 tokens before the picture's.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from released import released
from torch import nn

from hyimg_cli.media.images import SourceImage
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.card import weight_counts
from hyimg_cli.models.hunyuan_image3.config import Architecture, architecture
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.placement import stays_wide
from hyimg_cli.models.hunyuan_image3.prompter import Prompter
from hyimg_cli.models.hunyuan_image3.sequence import Layout, SourceShape
from hyimg_cli.models.hunyuan_image3.vision import vision_inputs
from hyimg_cli.models.hunyuan_image3.weights import expected_shapes, without_weights
from hyimg_cli.spec.card import WeightCounts
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.options import TextSampling

DEVICE = torch.device("cuda:0")
SIZE = Size(832, 1216)
# Slots of K/V behind which a token is decoded, and requests that work together.
CONTEXT, TOGETHER = 7000, 16
# Few tokens are written: their number changes nothing in a step; the prefix keeps its length.
_THINK, _PREFIX = 5, 6793


@dataclass(frozen=True)
class Workload:
    """The network's numbers, and one request's sequence."""

    arch: Architecture
    prompter: Prompter
    job: ImageJob
    shape: SourceShape
    layout: Layout

    @property
    def live(self) -> int:
        """Rows of a branch in a denoise step."""
        return self.layout.live_stop - self.layout.live_start

    def request(self, number: int, *, steps: int, guidance: float) -> ImageJob:
        """A request like the others, with a source image, a seed and a text of its own."""
        return replace(
            self.job,
            custom_id=f"request-{number}",
            images=(f"source-{number}",),
            seed=number,
            num_inference_steps=steps,
            guidance_scale=guidance,
            ar_seed=number,
        )


def source(path: str) -> SourceImage:
    """A black picture, named by `path`."""
    return SourceImage(np.zeros((SIZE.height, SIZE.width, 3), np.uint8), digest=path, notes=())


def workload(folder: Path, layers: int, **config: Any) -> Workload:
    """Write a checkpoint's small files into `folder`; `config`: what differs from the released."""
    embedded = registry.resolve_model(registry.EMBEDDED)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(embedded / name, folder / name)
    own = released(json.loads((embedded / "config.json").read_text())) | config
    per_layer = ("moe_topk", "num_shared_expert", "moe_intermediate_size")
    own |= {"num_hidden_layers": layers} | {name: own[name][:layers] for name in per_layer}
    arch = architecture(own)
    shapes = expected_shapes(arch)
    (folder / "config.json").write_text(json.dumps(own))
    total = {"total_size": 2 * sum(map(math.prod, shapes.values()))}
    index = {"metadata": total, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    prompter = registry.sequences(str(folder))
    prompter.card = replace(prompter.card, weights=_counts(shapes))
    bucket, _ = prompter.fit(SIZE.height, SIZE.width)
    assert bucket.size == SIZE
    shape = prompter.source_shape(bucket, vision_inputs(source("").pixels, arch.vision).grid)
    words = prompter.vocabulary
    written = [words.think, *words.encode("a")[:1] * (_THINK - 2), words.end_think]
    count, layout = 1, None
    while layout is None or layout.live_start < _PREFIX:
        count += 0 if layout is None else _PREFIX - layout.live_start
        job = _job(folder, "a" * count)
        layout = prompter.picture(job, [shape], written, bucket)
    assert layout.live_start == _PREFIX
    return Workload(arch, prompter, job, shape, layout)


def build(arch: Architecture, form: str) -> HunyuanImage3ForCausalMM:
    """The network on the fake GPU, its experts `fp8` or `dense`, in bfloat16."""
    network = without_weights(arch, "fp8" if form == "fp8" else "none")
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for layer in network.model.layers:
        if form == "fp8":
            layer.mlp.make_room(torch.bfloat16, DEVICE)
        _make(layer, names)
        layer.mlp.stack()
    _make(network, names)
    network.model.choose_kernels()
    return network.requires_grad_(False).eval()


def _make(part: nn.Module, names: Mapping[int, str]) -> None:
    for module in part.modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                dtype = torch.float32 if stays_wide(names[id(parameter)]) else torch.bfloat16
                made = torch.empty(parameter.shape, device=DEVICE, dtype=dtype)
                setattr(module, own, nn.Parameter(made, requires_grad=False))


def _job(folder: Path, system: str) -> ImageJob:
    return ImageJob(
        custom_id="request",
        task="it2i",
        prompt="turn the day into night",
        images=("source",),
        model=str(folder),
        seed=0,
        size=SizeRequest(SIZE.height, SIZE.width),
        num_inference_steps=50,
        guidance_scale=2.5,
        flow_shift=3.0,
        bot_task="think_recaption",
        text=TextSampling(temperature=0.6, top_k=1024, top_p=0.95, max_new_tokens=_THINK),
        use_system_prompt="custom",
        system_prompt=" ".join(system),
    )


def _counts(shapes: Mapping[str, tuple[int, ...]]) -> WeightCounts:
    """What a card counts in a real checkpoint's headers, of these tensors alone."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    rows = sum(shape[0] for name, shape in shapes.items() if ".experts." in name)
    return weight_counts(sizes, experts, rows)
