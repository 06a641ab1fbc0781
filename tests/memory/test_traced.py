"""Released models traced on the fake GPU: what steps wait for, and what the plan says of them.

The table is held against the plan of this code; thorough tests trace again.
"""

from pathlib import Path
from typing import Any

import pytest
from conftest import thorough_but
from fake_gpu.table import rows

from hyimg_cli.settings.run import Offloading

ROWS = {(row["family"], row["name"], row["offload"]): row for row in rows()}
FILMS = [key for key in ROWS if key[0] == "films"]
PICTURES = [key for key in ROWS if key[0] == "pictures"]
QUICK = [("films", name, "none") for name in ("HunyuanVideo-1.5-480p-t2v", "Wan2.2-TI2V-5B")]
# The plan's moment of each stage that it counts; others never take most.
MOMENTS = {"encode prompts": "text", "decode": "decode"}
# The first step sends what is constant in a job.
FIRST = "step 1"


def moment_of(stage: str) -> str:
    return "denoise" if stage.startswith("step") else MOMENTS.get(stage, "")


def problems(row: dict[str, Any], planned: dict[str, int]) -> list[str]:
    """What of a trace is not as it must be."""
    found = []
    for name, stage in row["stages"].items():
        if "step" in name and not name.endswith(FIRST):
            found += [f"{name} {what}" for what in ("reads", "waits", "masks") if stage[what]]
        if stage["strays"]:
            found.append(f"{name} uses another stream's memory")
    peaks: dict[str, int] = {}
    for name, stage in row["stages"].items():
        moment = moment_of(name)
        peaks[moment] = max(peaks.get(moment, 0), stage["peak"])
    for moment, plan in planned.items():
        if moment == "decode" and row["offload"] != "none" and peaks[moment] > plan:
            # It begins with what the last step held, which leaves before the VAE comes.
            if peaks[moment] > peaks["denoise"]:
                found.append("a decode takes more than a step")
        elif not 0.85 <= peaks[moment] / plan <= 1:
            found.append(f"{moment}: {peaks[moment] / plan:.3f} of the plan")
    if planned and peaks.get("", 0) > max(planned.values()):
        found.append("a stage that the plan leaves out takes most")
    return found


@pytest.mark.parametrize("key", thorough_but(QUICK, FILMS), ids=" ".join)
def test_a_film_takes_what_the_plan_says_and_its_steps_never_wait(
    tmp_path: Path, key: tuple[str, str, Offloading]
) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from fake_gpu.films import prepared

    _, name, offload = key
    assert problems(ROWS[key], prepared(tmp_path, name, offload).planned) == []


@pytest.mark.parametrize("key", PICTURES, ids=" ".join)
def test_pictures_take_what_the_plan_says_and_their_steps_never_wait(
    key: tuple[str, str, str],
) -> None:
    """One alone, an edit with a text, and edits together."""
    row = ROWS[key]
    assert problems(row, {}) == []
    for kind, planned in row["planned"].items():
        stages = row["stages"].items()
        peak = max(stage["peak"] for name, stage in stages if name.startswith(f"{kind} "))
        assert 0.85 <= peak / planned <= 1, kind


@pytest.mark.thorough
@pytest.mark.parametrize("key", [*FILMS, *PICTURES], ids=" ".join)
def test_traced_again_it_is_as_in_the_table(key: tuple[str, str, str]) -> None:
    """Peaks within a hundredth; other versions of the libraries allocate a little otherwise."""
    from fake_gpu.trace import traced

    again, row = traced(*key), ROWS[key]
    assert {*row["stages"]} <= {*again.stages}
    for name, kept in row["stages"].items():
        stage = again.stages[name]
        assert stage.peak == pytest.approx(kept["peak"], rel=0.01), name
        assert (stage.sent, stage.masks, stage.reads) == (
            kept["sent"],
            kept["masks"],
            kept["reads"],
        )
