"""A row of distances: which pictures of two runs are compared, and what is missing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pngs import write_png

from hyimg_cli.measure.bench.budget import row
from hyimg_cli.measure.bench.runs import RUN_PHASES, RunResult
from hyimg_cli.quality.metrics import PIXEL_METRICS
from hyimg_cli.spec.events import Outcome

METRICS = tuple(PIXEL_METRICS.values())


def flat(level: int, side: int = 16) -> np.ndarray:
    return np.full((side, side, 3), level, dtype=np.uint8)


def run_of(folder: Path, **pictures: np.ndarray | list[np.ndarray] | None) -> RunResult:
    """A run's folder: a picture, the frames of a video, or a failed job for each name."""
    lines: list[dict[str, Any]] = []
    for name, made in pictures.items():
        output: dict[str, Any] = {"path": f"outputs/{name}.png"}
        frames = folder / "outputs" / f"{name}.frames"
        frames.mkdir(parents=True)
        if isinstance(made, list):
            output = {"path": f"outputs/{name}.mp4", "frames_path": f"outputs/{name}.frames"}
            for number, pixels in enumerate(made):
                write_png(frames / f"{number:04}.png", pixels, {})
        elif made is not None:
            write_png(folder / output["path"], made, {})
        status = "failed" if made is None else "done"
        outputs = [] if made is None else [output]
        lines.append({"custom_id": name, "status": status, "outputs": outputs})
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcomes = tuple(Outcome(name, "done", "key") for name in pictures)
    return RunResult(folder, 1.0, 0.0, dict.fromkeys(RUN_PHASES, 0.0), outcomes)


def test_pictures_and_frames_are_compared_by_name(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", still=flat(9), clip=[flat(1), flat(2)])
    b = run_of(tmp_path / "b", clip=[flat(1), flat(5)], still=flat(9))
    found = row("A vs B", a, b, METRICS)
    assert set(found.distances) == {"still", "clip frame 0000", "clip frame 0001"}
    assert found.missing == ()
    assert sorted(found.unchanged) == ["clip frame 0000", "still"]
    assert not found.is_equal
    entry = found.to_json()
    assert (entry["pictures"], entry["max_abs"], entry["equal_share"]) == (3, 3, 0.0)
    assert (entry["psnr_median"], entry["by_job"]["still"]["psnr"]) == ("inf", "inf")
    assert entry["by_job"]["still"]["lpips"] is None
    assert row("A twice", a, a, METRICS).is_identical


@pytest.mark.parametrize("other", [None, flat(9, side=17)])
def test_a_job_without_a_pair_of_one_size_is_missing(
    tmp_path: Path, other: np.ndarray | None
) -> None:
    a = run_of(tmp_path / "a", x=flat(1), y=flat(9))
    found = row("A vs B", a, run_of(tmp_path / "b", x=flat(1), y=other), METRICS)
    assert (set(found.distances), found.missing) == ({"x"}, ("y",))
    assert found.psnr == 0.0
    assert not found.is_equal


def test_a_job_that_fails_in_both_is_missing_and_one_of_one_side_is_not(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", x=flat(1), gone=None, only_a=flat(2))
    b = run_of(tmp_path / "b", x=flat(1), gone=None)
    found = row("A vs B", a, b, METRICS)
    assert (set(found.distances), found.missing) == ({"x"}, ("gone",))


def test_a_picture_too_small_for_a_metric_has_none(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", x=flat(1, side=8))
    entry = row("A twice", a, a, METRICS).to_json()
    assert (entry["ssim_min"], entry["by_job"]["x"]["ssim"], entry["psnr_min"]) == (
        None,
        None,
        "inf",
    )
