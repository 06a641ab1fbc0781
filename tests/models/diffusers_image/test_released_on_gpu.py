"""Released editors on a fake GPU: no step waits, peaks are the plan's, and blocks come once."""

from typing import Any

import pytest
from fake_gpu.released_editors import CHECKPOINTS
from fake_gpu.table import rows
from fake_gpu.trace import traced

pytest.importorskip("triton", reason="what runs on a GPU is written in Triton")
KLEIN = "black-forest-labs/FLUX.2-klein-4B"
ROWS = {(row["name"], row["offload"]): row for row in rows() if row["family"] == "editors"}
_MOMENTS = {"encode": "text", "step": "denoise", "decode": "decode"}


def test_every_released_editor_is_in_the_table() -> None:
    assert {name for name, offload in ROWS if offload == "none"} == set(CHECKPOINTS)


@pytest.mark.parametrize("key", [key for key in ROWS if key[1] == "none"], ids=" ".join)
def test_no_step_waits_and_peaks_are_what_the_plan_says(key: tuple[str, str]) -> None:
    """But for a job's first step, in which its prefixes are named and made."""
    row = ROWS[key]
    step = row["stages"]["step 2"]
    assert [step[what] for what in ("reads", "waits", "strays")] == [{}, {}, {}]
    assert [step[what] for what in ("sent", "fetched", "masks")] == [0, 0, 0]
    # Every attention by a fused kernel.
    assert not any("math" in name for name in step["attention"])
    peaks = dict.fromkeys(_MOMENTS.values(), 0)
    for name, stage in row["stages"].items():
        if moment := _MOMENTS.get(name.split()[0]):
            peaks[moment] = max(peaks[moment], stage["peak"])
    planned: dict[str, int] = row["planned"]
    assert all(0.85 * planned[one] <= peaks[one] <= planned[one] for one in planned), (
        peaks,
        planned,
    )


@pytest.mark.parametrize("key", [key for key in ROWS if key[1] != "none"], ids=" ".join)
def test_what_waits_in_main_memory_comes_once_a_step_and_never_goes_back(
    key: tuple[str, str],
) -> None:
    """In groups little is on the GPU, and the plan's margins are most of it: 0.7 and more."""
    row, offload = ROWS[key], key[1]
    step = row["stages"]["step 2"]
    assert [step[what] for what in ("reads", "waits", "strays")] == [{}, {}, {}]
    assert (step["fetched"], step["masks"]) == (0, 0)
    brought = row["block_bytes"] if offload == "group" else 0
    assert brought <= step["sent"] <= 1.001 * brought
    least = 0.7 if offload == "group" else 0.85
    most = max(stage["peak"] for stage in row["stages"].values())
    assert least * max(row["planned"].values()) <= most <= max(row["planned"].values())
    assert least * row["planned"]["denoise"] <= step["peak"] <= row["planned"]["denoise"]


@pytest.mark.thorough
@pytest.mark.parametrize("key", ROWS, ids=" ".join)
def test_traced_again_it_is_as_in_the_table(key: tuple[str, str]) -> None:
    again, row = traced("editors", *key), ROWS[key]
    assert again.planned == row["planned"]
    for name, stage in again.stages.items():
        kept: dict[str, Any] = row["stages"][name]
        assert stage.peak == pytest.approx(kept["peak"], rel=0.01), name
        assert (stage.sent, stage.masks, stage.reads) == (
            kept["sent"], kept["masks"], kept["reads"],
        )  # fmt: skip


def test_a_step_with_blocks_in_groups_brings_each_once_and_nothing_back() -> None:
    """At 1024 pixels a side: two blocks are on the GPU, and the host never waits."""
    found = traced("editors", KLEIN, "group")
    step = found.stages["step 2"]
    assert found.block_bytes <= step.sent <= 1.001 * found.block_bytes
    assert step.fetched == 0
    assert (step.reads, step.waits, step.strays) == ({}, {}, {})
    assert step.masks == 0
    assert step.peak < found.block_bytes / 2
