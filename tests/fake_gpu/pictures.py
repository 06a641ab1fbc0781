"""BAGEL and HunyuanImage-3 on the fake GPU: jobs through the picture pipeline, one kind after
another. A CUDA graph has nothing to be captured with, so texts are decoded without.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from fake_gpu.pipelines import run
from fake_gpu.released_pictures import write_bagel, write_hunyuan
from fake_gpu.trace import Trace, fake_process
from PIL import Image

from hyimg_cli.memory.available import available_memory
from hyimg_cli.memory.fit import spare_bytes
from hyimg_cli.memory.footprint import Together, held_weights, needs
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image.pipeline import ImagePipeline
from hyimg_cli.settings.run import (
    BatchConfig,
    MachineInfo,
    ModelChoice,
    OutputConfig,
    Quantization,
    RunConfig,
)
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling

WRITERS = {"BAGEL-7B-MoT": write_bagel, "HunyuanImage-3.0-Instruct": write_hunyuan}
# What fits one GPU: the 80B model's experts in 8 bits.
FORMS: dict[str, Quantization] = {"HunyuanImage-3.0-Instruct": "fp8"}
SIDE, STEPS, TOKENS, TOGETHER = 1024, 3, 3, 3


def trace(folder: Path, name: str, offload: str, card_gb: int) -> Trace:
    """Run a picture, an edit with a text, and several edits together.

    `offload`: none or experts.
    """
    model = str(WRITERS[name](folder / "checkpoint"))
    card, paths = registry.model_card(model), []
    for number in range(TOGETHER):
        paths.append(str(folder / f"source-{number}.png"))
        Image.fromarray(np.full((SIDE, SIDE, 3), number, np.uint8)).save(paths[-1])
    of_bagel = card.family == "bagel"
    plain = ImageJob(
        custom_id="picture",
        task="t2i",
        prompt="a small red house by the sea, painted in the evening light " * 4,
        model=model,
        images=(),
        seed=7,
        size=SizeRequest(SIDE, SIDE),
        text=TextSampling(0.6, 1024, 0.95, TOKENS),
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        flow_shift=3.0,
        ar_seed=7,
        bot_task="none",
        use_system_prompt="None",
        image_guidance_scale=1.5 if of_bagel else None,
        guidance_interval=(0.0, 1.0) if of_bagel else None,
        guidance_renorm="global" if of_bagel else None,
    )
    thinks = "think" if of_bagel else "think_recaption"
    edit = replace(plain, task="it2i", images=(paths[0],), bot_task=thinks)
    edits = [
        replace(edit, custom_id=f"edit-{number}", seed=number, ar_seed=number, images=(path,))
        for number, path in enumerate(paths)
    ]
    machine = MachineInfo(has_gpu=True, has_triton=True)
    choice = ModelChoice(
        model,
        dtype="bfloat16",
        device="cuda:0",
        quantization=FORMS.get(name, "none"),
        decode_graphs="off",
        offloads_experts=offload == "experts",
        machine=machine,
    )
    batch = BatchConfig(
        prewarm=False, prefetches_sources=False, prefix_cache_mb=0, max_size=TOGETHER
    )
    config = RunConfig(OutputConfig(folder), model=choice, batch=batch)
    every = [plain, edit, *edits]
    with fake_process(card_gb) as stages:
        # What the card has besides the work of all jobs is for experts that stay.
        there = available_memory(config)
        stay = spare_bytes(every, config, there) if choice.offloads_experts else 0
        pipeline = ImagePipeline(config)
        for kind, jobs in (("picture", [plain]), ("edit", [edit]), ("edits", edits)):
            found, count = needs(jobs, card, config, prefixes=0), len(jobs)
            total = found.widest(Together(count, count), held_weights(card, config)).total
            stages.trace.planned[kind] = total + stay
            run(stages, pipeline, model, jobs, prefix=f"{kind} ", expected=every)
        stages.trace.blocks = len(pipeline._resident().layer_devices)
    return stages.trace
