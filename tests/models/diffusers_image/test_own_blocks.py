"""Blocks that replace the library's give what the library's give."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import ClassifierFreeGuidance, Krea2Transformer2DModel, ZImageTransformer2DModel
from diffusers.modular_pipelines.flux2.decoders import Flux2UnpackLatentsStep
from diffusers.modular_pipelines.krea2.denoise import Krea2LoopDenoiser
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_image.own_blocks import (
    BranchesOfOwnLengths,
    RowsInOrder,
    _attend_by_length,
)
from hyimg_cli.settings.run import ModelChoice


@pytest.mark.parametrize("lengths", [(5, 70), (70, 5), (33, 64)])
@torch.no_grad()
def test_texts_of_unequal_length_need_no_mask(
    checkpoint: Callable[[str], Path], lengths: tuple[int, int]
) -> None:
    """As a GPU does it: equal but for rounding. One of equal length after filling has none."""
    network = ZImageTransformer2DModel.from_pretrained(checkpoint("z-image") / "transformer")
    torch.manual_seed(1)
    picture = torch.randn(network.config.in_channels, 1, 12, 8)
    width = network.config.cap_feat_dim
    texts = [torch.randn(length, width) for length in lengths]
    given = {"x": [picture] * 2, "t": torch.tensor([0.3, 0.3]), "cap_feats": texts}
    expected = network(**given, return_dict=False)[0]
    _attend_by_length(network, lengths)
    found = network(**given, return_dict=False)[0]
    for one, own in zip(expected, found, strict=True):
        torch.testing.assert_close(own, one, atol=1e-5, rtol=1e-4)
    # Those of another text are not its own.
    _attend_by_length(network, lengths[::-1])
    other = network(**given, return_dict=False)[0]
    filled = {-(-length // 32) for length in lengths}
    assert all(torch.allclose(*pair) for pair in zip(expected, other, strict=True)) == (
        len(filled) == 1
    )


@pytest.mark.parametrize(("height", "width"), [(64, 96), (16, 16), (48, 32)])
def test_rows_in_order_are_unpacked_as_the_library_does(height: int, width: int) -> None:
    sides = height // 16, width // 16
    places = torch.cartesian_prod(*(torch.arange(n) for n in (1, *sides, 1)))[None]
    latents = torch.randn(1, sides[0] * sides[1], 8)
    given = {"latents": latents, "latent_ids": places, "height": height, "width": width}
    components = SimpleNamespace(vae_scale_factor=8)
    own, library = (
        block(components, PipelineState(dict(given)))[1].get("latents")
        for block in (RowsInOrder(), Flux2UnpackLatentsStep())
    )
    assert torch.equal(own, library)
    assert own.stride() == library.stride()


@pytest.mark.parametrize("counts", [(5, 9), (9, 5), (12, 12)])
@torch.no_grad()
def test_texts_that_are_not_filled_up_give_what_masked_ones_do(
    checkpoint: Callable[[str], Path], counts: tuple[int, int]
) -> None:
    """Of Krea 2, as a GPU does it: equal but for rounding, with either text the longer one."""
    network = Krea2Transformer2DModel.from_pretrained(checkpoint("krea2") / "transformer")
    torch.manual_seed(1)
    places = torch.zeros(6, 3)
    places[:, 1:] = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    shape = (1, 12, network.config.num_text_layers, network.config.text_hidden_dim)
    texts = [torch.randn(shape) for _ in counts]
    masks = [(torch.arange(12) < count)[None] for count in counts]
    names = ("prompt_embeds", "negative_prompt_embeds")
    state = SimpleNamespace(
        latents=torch.randn(1, 6, network.config.in_channels),
        timestep=torch.tensor([0.4]),
        num_inference_steps=2,
        attention_kwargs=None,
        position_ids=torch.cat([torch.zeros(12, 3), places]),
        **dict(zip(names, texts, strict=True)),
        **{f"{name}_mask": mask for name, mask in zip(names, masks, strict=True)},
    )
    guider = ClassifierFreeGuidance(guidance_scale=3.0, use_original_formulation=True)
    components = SimpleNamespace(transformer=network, guider=guider)
    Krea2LoopDenoiser()(components, state, 0, torch.tensor(400.0))
    masked = state.noise_pred
    for name, text, count in zip(names, texts, counts, strict=True):
        setattr(state, name, text[:, :count])
        setattr(state, f"{name}_mask", None)
    state.position_ids = state.position_ids[12 - counts[0] :]
    BranchesOfOwnLengths()(components, state, 0, torch.tensor(400.0))
    torch.testing.assert_close(state.noise_pred, masked, atol=1e-5, rtol=1e-4)


def test_a_prompt_of_flux_2_has_its_authors_message(checkpoint: Callable[[str], Path]) -> None:
    """With a line break, as in the classic pipeline; the library's block has another one."""
    model = registry.load_editor(ModelChoice(str(checkpoint("flux2-dev")), device="cpu"))
    (block,) = model.stage("text_encoder", has_images=False)
    assert block.DEFAULT_SYSTEM_MESSAGE == SYSTEM_MESSAGE
    assert SYSTEM_MESSAGE.replace("\n", " ") == type(block).DEFAULT_SYSTEM_MESSAGE
