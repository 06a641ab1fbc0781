"""Verdicts on two files: equal by digest, or their distance and possible reasons."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pngs import write_png

from hyimg_cli.errors import OutputFolderError
from hyimg_cli.measure.replay import run_folder
from hyimg_cli.measure.replay.verdict import ReplayVerdict, compared_file, verdict
from hyimg_cli.media.metadata import Provenance, video_text
from hyimg_cli.media.recorded import read_described
from hyimg_cli.media.video import write_video
from hyimg_cli.spec import digest

JOB = {"custom_id": "a", "prompt": "a dog", "model": "tiny-video", "task": "t2v"}
CPU = {"device": "cpu", "threads": "2"}
RAMP = np.arange(64 * 64 * 3, dtype=np.int64).reshape(64, 64, 3) % 251


def film(path: Path, provenance: Provenance, *, frames: int = 3, shift: int = 0) -> str:
    """Writes a film and gives the digest of its frames before compression."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shots = np.stack([(RAMP + 5 * n + shift) % 251 for n in range(frames)]).astype(np.uint8)
    return write_video(path, [shots], fps=8, comment=video_text(JOB, provenance)).pixel_sha256


def of_films(tmp_path: Path, original: Provenance, **made: Any) -> ReplayVerdict:
    film(tmp_path / "a.mp4", original)
    pixels = film(tmp_path / "b" / "a.mp4", Provenance("2", "m", CPU, {"torch": "2.11"}), **made)
    described = read_described(tmp_path / "a.mp4")
    return verdict(described, tmp_path / "a.mp4", tmp_path / "b" / "a.mp4", pixels)


def test_equal_frames_in_differing_files_are_equal(tmp_path: Path) -> None:
    found = of_films(tmp_path, Provenance("1", "m"))
    assert (found.equal, found.compared, found.reasons) == (True, "frames as decoded", ())


def test_reasons_are_what_is_recorded_differently(tmp_path: Path) -> None:
    before = Provenance("1", "n", {"device": "cuda", "experts": "fp8"}, {"torch": "2.15"})
    found = of_films(tmp_path, before, shift=9)
    assert not found.equal
    assert found.psnr is not None
    assert set(found.reasons) == {
        "the model is different",
        "hyimg 1, now 2",
        "device cuda, now cpu",
        "experts fp8, now by default",
        "threads by default, now 2",
        "torch 2.15, now 2.11",
        "on a GPU another batch or kernel may round sums differently",
    }


def test_nothing_recorded_is_a_reason_too(tmp_path: Path) -> None:
    reasons = of_films(tmp_path, Provenance("2", "m"), shift=9).reasons
    assert reasons == ("device, dtype and packages of the original are not recorded",)


def test_other_lengths_have_no_distance(tmp_path: Path) -> None:
    found = of_films(tmp_path, Provenance("2", "m", CPU, {"torch": "2.11"}), frames=2)
    assert (found.equal, found.psnr) == (False, None)
    assert "length" in found.not_measured
    assert found.to_json()["psnr"] is None


def test_a_difference_that_compression_took_is_one(tmp_path: Path) -> None:
    """The run's own line knows the frames before compression; the files then are equal."""
    pixels = film(tmp_path / "run" / "outputs" / "a.mp4", Provenance("1", "m", CPU))
    original = tmp_path / "run" / "outputs" / "a.mp4"
    line = {"path": "outputs/a.mp4", "sha256": digest.of_file(original), "pixel_sha256": "e" * 64}
    results = tmp_path / "run" / "results.jsonl"
    results.write_text(json.dumps({"custom_id": "a", "status": "done", "outputs": [line]}) + "\n")
    film(tmp_path / "a.mp4", Provenance("1", "m", CPU))
    found = verdict(read_described(original), original, tmp_path / "a.mp4", pixels)
    assert (found.compared, found.equal) == ("frames before compression", False)
    assert found.to_json()["psnr"] == "inf"
    results.write_text(
        json.dumps({"custom_id": "a", "status": "done", "outputs": [line | {"sha256": "0"}]}) + "\n"
    )
    assert run_folder.frames_digest(original) == ""
    results.write_text("damaged\n")
    assert run_folder.frames_digest(original) == ""


def test_a_sidecar_stands_for_the_film_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(video_text(JOB, Provenance("1", "m")))
    described = read_described(tmp_path / "a.json")
    assert compared_file(described) is None
    film(tmp_path / "a.mp4", Provenance("1", "m"))
    assert compared_file(described) == tmp_path / "a.mp4"


@pytest.mark.parametrize("name", ["jobs.jsonl", None])
def test_a_folder_with_results_of_a_run_is_left_alone(tmp_path: Path, name: str | None) -> None:
    run_folder.refuse_folder(tmp_path, tmp_path / "a.png", "a")
    (tmp_path / "results.jsonl").write_text('{"custom_id": "a"}\n')
    if name:
        (tmp_path / "run.json").write_text(json.dumps({"manifest": {"name": name}}))
    with pytest.raises(OutputFolderError):
        run_folder.refuse_folder(tmp_path, tmp_path / "a.png", "a")


def test_a_damaged_resolved_manifest_is_as_none(tmp_path: Path) -> None:
    path = tmp_path / "run" / "outputs" / "a.png"
    path.parent.mkdir(parents=True)
    write_png(path, np.zeros((8, 8, 3), dtype=np.uint8), {})
    for text in ("{", '[1]\n{"custom_id": "a", "images": 3, "model": 4}\n', "\xff"):
        (tmp_path / "run" / "manifest.resolved.jsonl").write_text(text, encoding="latin-1")
        assert run_folder.read_resolved(path, "a") == {}
