"""A result line is written after its files: after any kill, the files of each line exist."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.journal_file import JournalFile
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Outcome

STEPS: dict[str, Any] = {"num_inference_steps": 2}
QUICK = STEPS | {"bot_task": "none", "seed": 3}
FILM = STEPS | {"task": "t2v", "prompt": "a dog", "size": "64x64", "num_frames": 5}
# Two of each kind: the second one is at work while the first one's files are written.
JOBS = [
    {"custom_id": "a", "prompt": "a red circle"} | QUICK,
    {"custom_id": "b", "prompt": "a blue square"} | QUICK,
    {"custom_id": "c", "prompt": "make it blue", "images": "a.png", "keep_outside": True} | QUICK,
    {"custom_id": "d", "prompt": "make it red", "images": "a.png", "keep_outside": True} | QUICK,
    {"custom_id": "e"} | FILM,
    {"custom_id": "f", "seed": 1} | FILM,
]


def absent(folder: Path, entry: dict[str, Any]) -> list[str]:
    """Files of a line that are not there as the line says."""
    known = {output["path"]: output["sha256"] for output in entry["outputs"]}
    edit = entry.get("edit") or {"sha256": {}}
    known |= {edit[kind]: sha256 for kind, sha256 in edit["sha256"].items()}
    others = [str(Path(path).with_suffix(".json")) for path in known if path.endswith(".mp4")]
    for output in entry["outputs"]:
        if output.get("frames_path"):
            names = (f"{number:04}.png" for number in range(output["num_frames"]))
            others += [f"{output['frames_path']}/{name}" for name in names]
    missing = [name for name in (*known, *others) if not (folder / name).is_file()]
    changed = [
        name
        for name, sha256 in known.items()
        if name not in missing and digest.of_file(folder / name) != sha256
    ]
    return missing + changed


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[str]]:
    """By job what was absent when its line was written."""
    seen: dict[str, list[str]] = {}
    append = JournalFile.append

    def watched(self: JournalFile, lines: Sequence[bytes]) -> None:
        for line in lines:
            entry = json.loads(line)
            seen.setdefault(entry["custom_id"], []).extend(absent(tmp_path / "run", entry))
        append(self, lines)

    monkeypatch.setattr(JournalFile, "append", watched)
    return seen


def test_pictures_edits_and_videos_are_there_before_their_lines(
    run_cli: Callable[..., Any],
    write_manifest: Callable[..., Path],
    read_lines: Callable[[Path], list[dict[str, Any]]],
    lines: dict[str, list[str]],
    tmp_path: Path,
) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    flags = ("--device", "cpu", "--no-prewarm", "--no-report", "--frames", "png", "-q")
    ran = run_cli("generate", write_manifest(*JOBS), "-o", tmp_path / "run", *flags)
    assert ran.code == 0, ran.err
    assert lines == {job["custom_id"]: [] for job in JOBS}
    # What is looked for is what a result has.
    entries = {entry["custom_id"]: entry for entry in read_lines(tmp_path / "run/results.jsonl")}
    assert entries["c"]["edit"]["sha256"].keys() == {"plain", "shown", "mask"}
    assert entries["e"]["outputs"][0]["num_frames"] == 5
    assert absent(tmp_path, entries["e"]) == [
        "outputs/e.mp4", "outputs/e.json", *(f"outputs/e.frames/{n:04}.png" for n in range(5))
    ]  # fmt: skip


def test_lines_of_pieces_are_gathered_once_and_the_pieces_are_gone(tmp_path: Path) -> None:
    """Also where a kill came between: then lines are in both places."""
    place = tmp_path / "run"
    with RunFolder(place) as folder:
        folder.append(Outcome("a", "done", key="k"))
        folder.begin_pieces(b"{}")
        for number, name in enumerate("bc"):
            with RunFolder(place, piece=number) as piece:
                piece.append(Outcome(name, "done", key="k"))
                folder.gather()  # not while one is written
        kept = {path: path.read_bytes() for path in (place / "pieces").iterdir()}
        assert sorted(folder.results()) == ["a", "b", "c"]
    once = (place / "results.jsonl").read_bytes()
    assert once.count(b"\n") == 3
    assert not (place / "pieces").exists()
    (place / "pieces").mkdir()
    for path, data in kept.items():
        path.write_bytes(data)
    with RunFolder(place) as folder:
        assert sorted(folder.attempts) == ["a", "b", "c"]
    assert (place / "results.jsonl").read_bytes() == once
    assert not (place / "pieces").exists()
