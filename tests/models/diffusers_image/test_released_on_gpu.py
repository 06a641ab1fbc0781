"""Released editors on a fake GPU: no step waits or reads, and offload moves each block once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fake_gpu.editors import SIDE, STEPS, Traced, traced
from fake_gpu.released_editors import CHECKPOINTS

pytest.importorskip("triton", reason="what runs on a GPU is written in Triton")
# The library looks at the range of pixels, and these have no numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Passing `image` as torch tensor:FutureWarning")
KLEIN = "black-forest-labs/FLUX.2-klein-4B"
# Its transformer reads the numbers of its tokens' places in every forward.
READS = {"Qwen/Qwen-Image-2.1"}
# Its transformer makes a mask of the texts' padding, and attention reads that.
MASKS = {"Tongyi-MAI/Z-Image-Turbo"}
MIDDLE = f"step {STEPS // 2}"


@pytest.fixture(scope="module")
def trace(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]
) -> Callable[..., Traced]:
    root = tmp_path_factory.mktemp("on-gpu")

    @cache
    def of(model: str, offload: Any = "none") -> Traced:
        folder = root / model.split("/")[1]
        folder.mkdir(exist_ok=True)
        return traced(folder, model, checkpoint, offload=offload)

    return of


@pytest.mark.thorough
@pytest.mark.parametrize("model", CHECKPOINTS)
def test_a_step_neither_reads_nor_waits_nor_masks(trace: Callable[..., Traced], model: str) -> None:
    found = trace(model)
    step = found.stages[MIDDLE]
    if model not in READS:
        assert (step.reads, step.waits, step.sent) == ({}, {}, 0)
    assert (step.strays, step.fetched) == ({}, 0)
    # Every attention by a fused kernel.
    assert not any("math" in name for name in found.attention)
    assert (found.masks == 0) == (model not in MASKS)
    denoise = found.planned["denoise"]
    assert 0.85 <= step.peak / denoise <= 1.05, (step.peak, denoise)


def test_a_step_with_blocks_in_groups_brings_each_once_and_nothing_back(
    trace: Callable[..., Traced],
) -> None:
    """At 1024 pixels a side: two blocks are on the GPU, and the host never waits."""
    found = trace(KLEIN, "group")
    step = found.stages[MIDDLE]
    assert SIDE == 1024
    assert found.block_bytes <= step.sent <= 1.001 * found.block_bytes
    assert step.fetched == 0
    assert (step.reads, step.waits, step.strays) == ({}, {}, {})
    assert found.masks == 0
    assert step.peak < found.block_bytes / 2
