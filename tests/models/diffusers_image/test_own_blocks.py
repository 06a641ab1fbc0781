"""Blocks that replace the library's give what the library's give."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from diffusers.modular_pipelines.flux2.decoders import Flux2UnpackLatentsStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from hyimg_cli.models.diffusers_image.own_blocks import RowsInOrder, _attend_by_length


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
