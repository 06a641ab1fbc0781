"""The library's loop, one timestep a call: its blocks see what they would see in a whole run."""

from dataclasses import replace
from typing import Any

import pytest
import tiny_editors
from conftest import thorough_but
from diffusers import ModularPipelineBlocks
from models.diffusers_image.classic import Checkpoint
from models.diffusers_image.test_settings import begun, editor

from hyimg_cli.spec.job import ImageJob

STEPS = 3
QUICK = ("qwen-image", "klein", "longcat-edit")


@pytest.mark.parametrize("kind", thorough_but(QUICK, sorted(tiny_editors.PIPELINES)))
def test_blocks_see_the_index_and_the_whole_schedule(
    checkpoint: Checkpoint, job: ImageJob, kind: str
) -> None:
    folder = checkpoint(kind)
    steps = 40 if "turbo" in kind else STEPS
    seen = list[tuple[int, float, list[float]]]()
    model = editor(folder)
    edits = bool(model.kind.most)
    given = replace(
        job,
        task="it2i" if edits else "t2i",
        images=job.images if edits else (),
        num_inference_steps=steps,
    )

    class Spy(ModularPipelineBlocks):  # type: ignore[misc]
        def __call__(self, pipe: Any, state: Any, i: int, t: Any) -> tuple[Any, Any]:
            seen.append((i, float(t), state.timesteps.tolist()))
            return pipe, state

    denoiser = begun(model, given)
    denoiser._loop.sub_blocks["spy"] = Spy()
    whole, latents = denoiser._timesteps.tolist(), denoiser.latents
    assert len(whole) == denoiser.steps
    for index in range(denoiser.steps):
        latents = denoiser.step(index, latents)
    assert seen == [(index, whole[index], whole) for index in range(denoiser.steps)]
