"""The training forward is the product's forward: same hidden rows, same velocity."""

import random
from dataclasses import dataclass

import pytest
import torch
from tiny_world.architecture import LATENT_GRID, tiny_architecture
from tiny_world.batches import Row, RowBuilder, Written, batch, cot_text
from tiny_world.captions import Edit, Wish, random_edit, random_wish
from tiny_world.draw import no_jitter, render
from tiny_world.scenes import Scene
from tiny_world.stages import row_builder
from tiny_world.tokenizer import trained_tokenizer
from tiny_world.train_forward import Pictures, patches, train_forward
from torch import Tensor

from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.vision import vision_inputs
from hyimg_cli.models.protocols import DenoiseInput, Prefill

SOURCE = Scene("star", "yellow", "purple", "left", "small")
COPIES = 3
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Stage:
    network: HunyuanImage3ForCausalMM
    rows: RowBuilder
    pixels_BCYX: Tensor


@pytest.fixture(scope="module")
def stage() -> Stage:
    torch.manual_seed(0)
    tokenizer = trained_tokenizer()
    network = HunyuanImage3ForCausalMM(tiny_architecture(tokenizer)).eval()
    return Stage(network, row_builder(tokenizer), render([SOURCE], no_jitter(1)))


def _task(is_edit: bool, seed: int) -> Wish | Edit:
    rng = random.Random(seed)
    return random_edit(rng, SOURCE) if is_edit else random_wish(rng)


def step(timestep: float) -> Step:
    return Step(0, timestep / 1000, 0.0, timestep, 0.0, 0.0)


def _product(
    stage: Stage, row: Row, latents_KCYX: Tensor, timesteps_K: Tensor, source_1CYX: Tensor | None
) -> tuple[Tensor, Tensor]:
    network = stage.network
    sources = []
    if source_1CYX is not None:
        pixels = stage.pixels_BCYX[0].permute(1, 2, 0).numpy()
        inputs = vision_inputs(pixels, network.arch.vision)
        sources = [network.encode_source(source_1CYX, inputs)]
    buffer = network.new_buffer()
    hidden_M = network.prefill([Prefill(row.layout, row.ids, sources, buffer, row.prefix)])[0]
    branch = network.branch(row.layout, buffer)
    velocities = [
        network.velocity([DenoiseInput(latents_CYX, step(timestep.item()), 0.0, [branch])])[0][0]
        for latents_CYX, timestep in zip(latents_KCYX, timesteps_K, strict=True)
    ]
    return hidden_M, torch.stack(velocities)


@pytest.mark.parametrize("is_unconditional", [False, True], ids=["conditional", "unconditional"])
@pytest.mark.parametrize("written", ["think_recaption", "none"])
@pytest.mark.parametrize("is_edit", [False, True], ids=["new", "edit"])
@torch.no_grad()
def test_training_and_product_agree(
    stage: Stage, is_edit: bool, written: Written, is_unconditional: bool
) -> None:
    first = stage.rows.row(_task(is_edit, 1), written, is_unconditional=is_unconditional)
    # A longer neighbour pads the first row; it must not change it.
    rows = [first, stage.rows.row(_task(is_edit, 2), "think_recaption")]
    padded = batch(rows, stage.rows.vocabulary, copies=COPIES)
    channels = stage.network.arch.vae.latent_channels
    latents = torch.randn(2, COPIES, channels, LATENT_GRID, LATENT_GRID)
    timesteps = torch.rand(2, COPIES) * 1000
    source = torch.randn(2, channels, LATENT_GRID, LATENT_GRID) if is_edit else None
    pixels = stage.pixels_BCYX.repeat(2, 1, 1, 1) if is_edit else None
    outputs = train_forward(stage.network, padded, Pictures(latents, timesteps, source, pixels))
    hidden, velocity = _product(
        stage, first, latents[0], timesteps[0], None if source is None else source[:1]
    )
    torch.testing.assert_close(outputs.velocity_BKCYX[0], velocity, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(
        outputs.hidden_BSM[0, first.prefix - 1], hidden, atol=TOLERANCE, rtol=TOLERANCE
    )


def test_patches_are_the_processors(stage: Stage) -> None:
    pixels = stage.pixels_BCYX[0].permute(1, 2, 0).numpy()
    inputs = vision_inputs(pixels, stage.network.arch.vision)
    assert inputs.shapes_12.tolist() == [[LATENT_GRID, LATENT_GRID]]
    torch.testing.assert_close(patches(stage.pixels_BCYX), inputs.patches_1SP)


@pytest.mark.parametrize("written", ["think_recaption", "think", "recaption", "none"])
def test_what_is_learnt_is_what_the_ar_stage_writes(stage: Stage, written: Written) -> None:
    words = stage.rows.vocabulary
    task = _task(False, 3)
    row = stage.rows.row(task, written)
    padded = batch([row], words, copies=1)
    learnt = [int(i) for i in padded.next_ids_BS[0] if i >= 0]
    frame = [words.boi, words.img_size, words.ratios[16]]
    if written == "none":
        assert learnt == frame
        return
    text = words.encode(cot_text(task, written))
    assert learnt == [*text[1:], words.answer, *frame]


def test_the_unconditional_branch_learns_no_text(stage: Stage) -> None:
    row = stage.rows.row(_task(True, 4), "recaption", is_unconditional=True)
    padded = batch([row], stage.rows.vocabulary, copies=1)
    assert (padded.next_ids_BS < 0).all()
    assert (padded.ids_BS == stage.rows.vocabulary.cfg).any()
