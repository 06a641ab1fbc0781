"""Released editors on a fake GPU: no step waits or reads, and offload moves each block once."""

import pytest
from conftest import thorough_but
from fake_gpu.released_editors import CHECKPOINTS
from fake_gpu.trace import traced

pytest.importorskip("triton", reason="what runs on a GPU is written in Triton")
KLEIN = "black-forest-labs/FLUX.2-klein-4B"


@pytest.mark.parametrize("model", thorough_but([], CHECKPOINTS))
def test_a_step_neither_reads_nor_waits_nor_masks(model: str) -> None:
    """But for a job's first, in which its prefixes are named and made."""
    stages = traced("editors", model).stages
    for name in ("step 1",):
        step = stages[name]
        assert (step.reads, step.waits, step.sent) == ({}, {}, 0)
        assert (step.strays, step.fetched, step.masks) == ({}, 0, 0)
        # Every attention by a fused kernel.
        assert not any("math" in name for name in step.attention)


def test_a_step_with_blocks_in_groups_brings_each_once_and_nothing_back() -> None:
    """At 1024 pixels a side: two blocks are on the GPU, and the host never waits."""
    found = traced("editors", KLEIN, "group")
    step = found.stages["step 1"]
    assert found.block_bytes <= step.sent <= 1.001 * found.block_bytes
    assert step.fetched == 0
    assert (step.reads, step.waits, step.strays) == ({}, {}, {})
    assert step.masks == 0
    assert step.peak < found.block_bytes / 2
