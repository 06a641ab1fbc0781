"""A network whose experts are in main memory."""

from pathlib import Path

import torch

from hyimg_cli.models.hunyuan_image3.weights import load, offload_experts


def test_a_network_draws_and_writes_the_same(small_folder: Path) -> None:
    networks = [
        load(small_folder, dtype=torch.float32, offloads_experts=offloads)
        for offloads in (False, True)
    ]
    outside = offload_experts(networks[1], 3 * 4 * 96 * 192 * 4)
    assert outside.residents.count > 0
    hidden = []
    for network in networks:
        buffer = network.new_buffer(80)
        runs = [list(range(70)), *([n] for n in range(5))]
        with torch.no_grad():
            hidden.append(torch.stack([network.feed([(ids, buffer)])[0] for ids in runs]))
    assert torch.equal(*hidden)
    assert outside.fetched > 0
