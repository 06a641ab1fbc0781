"""What benchmarks measure and tests count: the network's numbers, the sizes of sequences, and the
request they come from.

`real` is HunyuanImage-3 Instruct as released; `tiny` the embedded checkpoint's shape, so that the
same code runs anywhere in seconds. No weights are read in either.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from released import released

from hyimg_cli.media.images import SourceImage
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.config import Architecture, architecture
from hyimg_cli.models.hunyuan_image3.prompter import Prompter
from hyimg_cli.models.hunyuan_image3.sequence import Layout, SourceShape
from hyimg_cli.models.hunyuan_image3.vision import vision_inputs
from hyimg_cli.models.hunyuan_image3.weights import expected_shapes
from hyimg_cli.spec.card import WeightCounts
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.options import TextSampling

_PROMPT = "turn the day into night and keep everything else as it is " * 3


@dataclass(frozen=True)
class Scale:
    """Sizes of everything that is run. `layers`, `top_k`, `inner`: of the whole network."""

    name: str
    layers: int
    top_k: int
    inner: int
    size: Size
    prefix: int
    context: int
    think: int
    steps: int
    fast_steps: int
    together: int
    floor_rows: int
    copy_bytes: int


REAL = Scale("real", 32, 8, 3072, Size(832, 1216), 6793, 7000, 450, 50, 8, 16, 8192, 4 << 30)
TINY = Scale("tiny", 4, 2, 96, Size(64, 64), 160, 60, 6, 3, 2, 3, 256, 1 << 20)
SCALES = {scale.name: scale for scale in (REAL, TINY)}


@dataclass(frozen=True)
class Workload:
    """The requests, and one request's sequence with exactly `prefix` tokens before the live
    rows. `layer`: the weights of one layer.
    """

    scale: Scale
    arch: Architecture
    prompter: Prompter
    job: ImageJob
    shape: SourceShape
    layout: Layout
    layer: WeightCounts

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


def source(path: str, size: Size) -> SourceImage:
    """A picture of noise, named by `path`."""
    generator = np.random.default_rng(sum(path.encode()))
    pixels = generator.integers(0, 256, (size.height, size.width, 3), dtype=np.uint8)
    return SourceImage(pixels, digest=path, notes=())


def workload(folder: Path, scale: Scale, layers: int, **changes: Any) -> Workload:
    """Write a checkpoint's small files into `folder`, and build what is run with them; `changes`:
    what of its configuration is another one.
    """
    config = _config(scale, layers) | changes
    arch = architecture(config)
    shapes = expected_shapes(arch)
    _write(folder, config, 2 * sum(map(math.prod, shapes.values())))
    prompter = registry.sequences(str(folder))
    prompter.card = replace(prompter.card, weights=_counts(shapes))
    first = {n: shape for n, shape in shapes.items() if n.startswith("model.layers.0.")}
    pixels = np.zeros((scale.size.height, scale.size.width, 3), dtype=np.uint8)
    bucket, _ = prompter.fit(scale.size.height, scale.size.width)
    assert bucket.size == scale.size, f"{scale.size} is no size of the model's"
    shape = prompter.source_shape(bucket, vision_inputs(pixels, arch.vision).grid)
    words = prompter.vocabulary
    text = words.encode("a")[:1] * (scale.think - 2)
    written = [words.think, *text, words.end_think]
    count = 1
    while True:
        job = _job(folder, scale, "a" * count)
        layout = prompter.picture(job, [shape], written, bucket)
        missing = scale.prefix - layout.live_start
        if missing == 0:
            return Workload(scale, arch, prompter, job, shape, layout, _counts(first))
        assert missing > 0 or count > 1, f"a request takes {-missing} tokens more than the prefix"
        count += missing


def _job(folder: Path, scale: Scale, system: str) -> ImageJob:
    return ImageJob(
        custom_id="request",
        task="it2i",
        prompt=_PROMPT,
        images=("source",),
        model=str(folder),
        seed=0,
        size=SizeRequest(scale.size.height, scale.size.width),
        num_inference_steps=scale.steps,
        guidance_scale=2.5,
        flow_shift=3.0,
        bot_task="think_recaption",
        text=TextSampling(temperature=0.6, top_k=1024, top_p=0.95, max_new_tokens=scale.think),
        use_system_prompt="custom",
        system_prompt=" ".join(system),
    )


def _config(scale: Scale, layers: int) -> dict[str, Any]:
    embedded = registry.resolve_model(registry.EMBEDDED)
    config: dict[str, Any] = json.loads((embedded / "config.json").read_text())
    if scale.name == REAL.name:
        config = released(config)
    return config | {
        "num_hidden_layers": layers,
        "moe_topk": [scale.top_k] * layers,
        "num_shared_expert": [1] * layers,
        "moe_intermediate_size": [scale.inner] * layers,
    }


def _write(folder: Path, config: dict[str, Any], total_bytes: int) -> None:
    embedded = registry.resolve_model(registry.EMBEDDED)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(embedded / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _counts(shapes: Mapping[str, tuple[int, ...]]) -> WeightCounts:
    """What a card counts in a real checkpoint's headers, of these tensors alone."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    rows = sum(shape[0] for name, shape in shapes.items() if ".experts." in name)
    encoder, decoder, gates = (
        sum(n for name, n in sizes.items() if part in name)
        for part in ("vae.encoder.", "vae.decoder.", ".gate.wg.")
    )
    wide = encoder + decoder + gates
    rest = sum(sizes.values()) - experts - wide
    return WeightCounts(experts, rows, wide, rest, encoder, decoder)
