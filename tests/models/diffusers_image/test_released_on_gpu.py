"""A released editor on a fake GPU: no step waits, peaks are the plan's, and blocks come once."""

from dataclasses import asdict

import pytest
from fake_gpu.released_editors import CHECKPOINTS
from fake_gpu.table import launches_a_layer, problems, rows
from fake_gpu.trace import traced

pytest.importorskip("triton", reason="what runs on a GPU is written in Triton")
KLEIN = ("editors", "black-forest-labs/FLUX.2-klein-4B", "group")


def test_every_released_editor_is_in_the_table() -> None:
    found = {
        row["name"].partition(" x ")[0]
        for row in rows()
        if (row["family"], row["offload"]) == ("editors", "none")
    }
    assert found == {*CHECKPOINTS}


def test_a_step_with_blocks_in_groups_brings_each_once_and_nothing_back() -> None:
    """At 1024 pixels a side: two blocks are on the GPU, and the host never waits."""
    found = asdict(traced(*KLEIN))
    found |= {"name": KLEIN[1], "offload": KLEIN[-1], "launches_a_layer": launches_a_layer(found)}
    assert problems(found, found["planned"]) == []
    assert found["stages"]["step 2"]["peak"] < found["block_bytes"] / 2
