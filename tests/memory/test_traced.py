"""Released models traced on the fake GPU: what steps wait for, and what the plan says of them.

The table is held against the plan of this code; thorough tests trace again.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from conftest import thorough_but
from fake_gpu.table import launches_a_layer, lines, problems, rows, uncompiled, ungrouped

from hyimg_cli.models import registry

ROWS = {(row["family"], row["name"], row["offload"]): row for row in rows()}
LATENT = [key for key in ROWS if key[0] in ("films", "editors")]
QUICK = [
    ("films", "Wan2.2-TI2V-5B", "none"),
    ("editors", "Tongyi-MAI/Z-Image-Turbo", "group"),
]
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
