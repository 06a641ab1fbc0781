"""A network whose experts are in main memory."""

from pathlib import Path

import pytest
import torch

from hyimg_cli.kernels.formats import one
from hyimg_cli.models.hunyuan_image3.weights import load, offload_experts
from hyimg_cli.settings.run import Quantization


def test_a_network_draws_and_writes_the_same(small_folder: Path) -> None:
    networks = [
        load(small_folder, dtype=torch.float32, offloads_experts=offloads)
        for offloads in (False, True)
    ]
    outside = offload_experts(networks[1], 3 * 4 * 96 * 192 * 4)
    assert outside.cache.count > 0
    hidden = []
    for network in networks:
        buffer = network.new_buffer()
        runs = [list(range(70)), *([n] for n in range(5))]
        with torch.no_grad():
            hidden.append(torch.stack([network.feed([(ids, buffer)])[0] for ids in runs]))
    assert torch.equal(*hidden)
    assert outside.fetched > 0


@pytest.mark.parametrize("form", ["none", "fp8"])
def test_experts_stay_in_main_memory_while_all_else_goes_to_the_device(
    small_folder: Path, form: Quantization
) -> None:
    """The meta device stands for a GPU: nothing else may tell them apart here."""
    there = load(small_folder, dtype=torch.float32, quantization=form)
    network = load(
        small_folder,
        dtype=torch.float32,
        device_map="meta",
        quantization=form,
        offloads_experts=True,
    )
    for own, other in zip(there.model.layers, network.model.layers, strict=True):
        for stack, waiting in zip(own.mlp.stacks, other.mlp.stacks, strict=True):
            assert torch.equal(one(stack, 3, torch.float32), one(waiting, 3, torch.float32))
    of_vae, others = set(), set()
    for name, own in network.named_parameters():
        if ".experts." not in name:
            (of_vae if name.startswith("vae.") else others).add(own.device.type)
    assert others == {"meta"}
    assert of_vae == {"cpu"}, "it comes for its turns"
