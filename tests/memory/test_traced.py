"""Released models traced on the fake GPU: what steps wait for, and what the plan says of them.

The table is held against the plan of this code; thorough tests trace again.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from conftest import thorough_but
from fake_gpu.table import launches_a_layer, lines, peaks, problems, rows, uncompiled, ungrouped

from hyimg_cli.journal.keys import key_of
from hyimg_cli.memory.available import AvailableMemory
from hyimg_cli.memory.fit import check_fit
from hyimg_cli.models import registry

ROWS = {(row["family"], row["name"], row["offload"]): row for row in rows()}
LATENT = [key for key in ROWS if key[0] in ("films", "editors")]
QUICK = [
    ("films", "Wan2.2-TI2V-5B", "none"),
    ("editors", "Tongyi-MAI/Z-Image-Turbo", "group"),
]
# One job alone, without an offload that is asked for.
MODELS = [key[:2] for key in LATENT if key[2] == "none" and " x " not in key[1]]
# Sizes of cards, in GB.
CARDS = (12, 16, 24, 48, 80)
PAGE = Path(__file__).parents[2] / "benchmarks" / "README.md"
# A prompt rewriter makes nothing by itself.
MAKERS = [one for one in registry.families() if not one.helps]


@pytest.mark.parametrize("key", ROWS, ids=" ".join)
def test_steps_never_wait_and_peaks_are_what_the_plan_says(key: tuple[str, str, str]) -> None:
    """After a job's first step; what waits in main memory comes once a forward."""
    assert problems(ROWS[key], ROWS[key]["planned"]) == []


@pytest.mark.parametrize("key", thorough_but(QUICK, LATENT), ids=" ".join)
def test_the_plan_of_the_table_is_that_of_this_code(
    tmp_path: Path, key: tuple[str, str, str]
) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    family, name, offload = key
    made: Any = import_module(f"fake_gpu.{family}").prepared(tmp_path, name, offload)
    assert made.planned == ROWS[key]["planned"]


def test_a_model_without_jobs_that_share_a_step_says_so() -> None:
    """Pictures are edited alone and together; of videos, LingBot-World's clips share steps."""
    together = {name.partition(" x ")[0] for _, name, _ in ROWS if " x " in name}
    for (family, name, _), row in ROWS.items():
        shares = family == "pictures" or name.partition(" x ")[0] in together
        assert [note.split(":")[0] for note in row["notes"]] == [] if shares else ["no batch"], name


def test_a_family_whose_blocks_are_not_compiled_says_why() -> None:
    """Those of others are, and jobs of ten lengths share their graphs: see `test_compiled`."""
    refuse = {one.name for one in MAKERS if "compile_blocks" not in one.follows}
    # Editors follow every setting of models that only denoise latents.
    assert {*uncompiled()} == refuse - {"diffusers_image"}


def test_every_offload_of_every_family_is_traced_or_says_why_not() -> None:
    """Blocks of all videos come one by one; of pictures, those of an editor of each size."""
    found = {offload: {name for _, name, on in ROWS if on == offload} for _, _, offload in ROWS}
    without = {name for family, name, _ in ROWS if family == "films"} - found["group"]
    assert {name.partition(" x ")[0] for name in without} == {"LingBot-World-fast"}
    assert {"HunyuanImage-3.0-Instruct"} == found["experts"]
    assert "LingBot-World-fast" in found["model"]
    refuse = {one.name for one in MAKERS if "cpu_offload=group" not in one.follows}
    assert {*ungrouped()} == refuse - {"diffusers_image"}


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert [line for line in lines() if line not in page] == []


def taken_by_cards(folder: Path, family: str, name: str) -> dict[int, str]:
    """The offload that a run takes by itself on a card of each size; "" where it is refused."""
    made: Any = import_module(f"fake_gpu.{family}").prepared(folder, name, "none")
    job, taken = made.jobs[0], dict[int, str]()
    for gb in CARDS:
        there = AvailableMemory(gb * 10**9, "cuda:0", main=512 * 10**9)
        found = check_fit(job.model, [job], made.config, there)
        assert key_of(job, [], found.config) == key_of(job, [], made.config), "the same pixels"
        taken[gb] = found.config.model.cpu_offload if found.is_enough else ""
        assert found.is_enough or "would fit with" in found.remedy or "fewer frames" in found.remedy
    return taken


@pytest.mark.parametrize("model", thorough_but([one[:2] for one in QUICK], MODELS), ids=" ".join)
def test_what_a_card_takes_by_itself_fits_by_the_plan_and_by_the_trace(
    tmp_path: Path, model: tuple[str, str]
) -> None:
    """And nothing that is faster does, by the plan."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    family, name = model
    for gb, offload in taken_by_cards(tmp_path, *model).items():
        free = gb * 10**9
        if offload:
            row = ROWS[family, name, offload]
            assert max(peaks(row).values()) <= max(row["planned"].values()) <= free
            if offload != "none":
                plain = ROWS[family, name, "none"]["planned"]
                assert max(plain.values()) > 0.85 * free, "it would have fit without"


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS, ids=" ".join)
def test_a_run_on_a_card_of_that_size_takes_it(tmp_path: Path, model: tuple[str, str]) -> None:
    """The product's own run on a fake GPU: nothing but its size decides, and it holds the peak."""
    from fake_gpu.trace import traced

    family, name = model
    smallest = dict[str, int]()
    for gb, offload in taken_by_cards(tmp_path, *model).items():
        smallest.setdefault(offload, gb)
    for refused_or_as_traced in ("", "none"):
        smallest.pop(refused_or_as_traced, None)
    for offload, gb in smallest.items():
        found = traced(family, name, "none", gb)
        expected = {
            stage: kept["peak"] for stage, kept in ROWS[family, name, offload]["stages"].items()
        }
        peak = {stage: found.stages[stage].peak for stage in expected}
        assert peak == pytest.approx(expected, rel=0.01), (gb, offload)
        assert max(peak.values()) <= gb * 10**9


@pytest.mark.thorough
@pytest.mark.parametrize("key", ROWS, ids=" ".join)
def test_traced_again_it_is_as_in_the_table(key: tuple[str, str, str]) -> None:
    """Peaks within a hundredth; other versions of the libraries allocate a little otherwise."""
    from dataclasses import asdict

    from fake_gpu.trace import traced

    row = ROWS[key]
    again = asdict(traced(*key, row["card_gb"]))
    assert again["planned"] == row["planned"]
    assert launches_a_layer(again) == row["launches_a_layer"]
    assert {*row["stages"]} <= {*again["stages"]}
    for name, kept in row["stages"].items():
        stage = again["stages"][name]
        assert stage["peak"] == pytest.approx(kept["peak"], rel=0.01), name
        same = ("sent", "masks", "reads")
        assert [stage[what] for what in same] == [kept[what] for what in same], name
