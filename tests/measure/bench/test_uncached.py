"""Recompute at every step: latents and counted rows against a simple program without a cache."""

from collections import Counter
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from measure.bench.conftest import ONE_EDIT

from hyimg_cli.diffusion.denoise import DenoiseState, denoise_step
from hyimg_cli.engine.runner import make_plan
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.measure.bench.runs import CountedRows, Uncached
from hyimg_cli.measure.bench.scenario import SCENARIOS
from hyimg_cli.media.images import read_image
from hyimg_cli.models.common.attention import kept_blocks
from hyimg_cli.models.common.spans import query_spans
from hyimg_cli.models.protocols import DenoiseInput, GeneratedText, Prefill

STEPS = 4


@pytest.fixture
def edit(loaded: Any, tmp_path: Any) -> tuple[Any, Any, list[Any]]:
    """A job of one source and a given text, its canvas, and the encoded source."""
    (tmp_path / "jobs.jsonl").write_text(ONE_EDIT)
    (job,) = make_plan(read_manifest(tmp_path / "jobs.jsonl")).jobs
    image = read_image(SCENARIOS / "images" / "red-circle.png")
    sources = [loaded.encode_source(image.pixels, image.digest)]
    text = tuple(loaded.prompter.vocabulary.encode("<recaption>a blue circle</recaption>"))
    # The size is that of the last ratio token.
    ending = (loaded.prompter.allowed_ratios[0],)
    return job, loaded.canvas(job, sources, GeneratedText(text, "", "", ending)), sources


@torch.no_grad()
def plain_latents(model: Any, job: Any, canvas: Any, sources: list[Any]) -> tuple[Any, int]:
    """The last latents [C, Y, X] and the rows computed: at each step, each branch's whole sequence
    in one forward, into memory of its own.
    """
    network, rows = model.network, 0
    plan = model.denoise_plan(job, canvas, 2)
    latents_CYX = plan.noise_CYX
    for step in plan.schedule.steps():
        found = []
        for own in canvas.branches:
            layout, buffer = own.layout, model.new_buffer()
            encoded = [one.rows for one in sources]
            prefill = Prefill(layout, own.ids, encoded, buffer, own.live_start)
            prefix_TM, rope_2TD, seen = network._entering(prefill)
            spans = query_spans(own.live_start, own.live_stop, layout.full_spans)
            (block,) = kept_blocks([(buffer, (*seen, *spans))])
            buffer.commit(own.live_start)
            branch = network.branch(layout, buffer)
            live = [DenoiseInput(latents_CYX, step, job.guidance_scale, [branch])]
            x_TM = torch.cat([prefix_TM, network._live_rows(live)[0]])
            rope_2TD = torch.cat([rope_2TD, branch.live_rope_2TD], dim=1)
            hidden_TM = network.model.through_layers(x_TM, rope_2TD, [block])
            rows += len(x_TM)
            image_1SM = hidden_TM[None, own.live_start + layout.target.special_count :]
            embedding_1M = network.time_embed_2(network._scalars([step.timestep]))
            found.append(network.final_layer(image_1SM, embedding_1M, latents_CYX.shape[1])[0])
        conditional, unconditional = found
        velocity = unconditional + job.guidance_scale * (conditional - unconditional)
        latents_CYX = latents_CYX + step.difference * velocity
    return latents_CYX, rows


def test_it_equals_a_plain_twin_in_latents_and_in_counted_rows(
    loaded: Any, edit: tuple[Any, Any, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, canvas, sources = edit
    job = replace(job, num_inference_steps=STEPS)
    # The twin pads nothing.
    monkeypatch.setattr(loaded.network.model, "row_multiple", 1)
    counted: Counter[str] = Counter()
    model = CountedRows(Uncached(loaded), counted)
    branches, buffers = [], []
    for own in canvas.branches:
        buffer = model.new_buffer()
        model.prefill([Prefill(own.layout, own.ids, sources, buffer, own.live_start)])
        branches.append(model.branch(own.layout, buffer))
        buffers.append(ref(buffer))
        del buffer
    state = DenoiseState(model.denoise_plan(job, canvas, 2), None)

    def velocities(states: Any) -> Any:
        live = DenoiseInput(state.latents, state.step, job.guidance_scale, branches)
        return model.velocities([live])

    while not state.is_done:
        denoise_step([state], velocities)
        assert not any(buffer() for buffer in buffers), "no K/V outlive a step"
    latents_CYX, rows = plain_latents(loaded, job, canvas, sources)
    assert torch.allclose(state.latents, latents_CYX, atol=1e-4)
    assert counted.total() == rows == STEPS * sum(own.live_stop for own in canvas.branches)
