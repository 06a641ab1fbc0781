"""`--shard` by name and by a queue's variables; `hyimg merge` joins folders."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hyimg_cli.cli.shard import shard_named
from hyimg_cli.errors import OutputFolderError, UsageError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Outcome

Run = Callable[..., Any]
Write = Callable[..., Path]
ReadLines = Callable[[Path], list[dict[str, Any]]]
pytestmark = pytest.mark.usefixtures("fake_session")

SLURM = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "5"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("2/8", SLURM, (2, 8)),
        ("auto", SLURM, (3, 4)),
        ("auto/4", SLURM, (3, 4)),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_STEP": "2"}, (3, 4)),
        ("auto", SLURM | KUBERNETES | {"SKYPILOT_JOB_RANK": "1"}, (3, 4)),
        ("auto", {"SKYPILOT_JOB_RANK": "0", "SKYPILOT_NUM_JOBS": "3"} | KUBERNETES, (1, 3)),
        ("auto/5", KUBERNETES | {"RANK": "3", "WORLD_SIZE": "8"}, (1, 5)),
        (None, SLURM, None),
    ],
)
def test_a_shard_by_name_and_by_what_a_queue_says(
    text: str | None, environment: dict[str, str], expected: tuple[int, int] | None
) -> None:
    assert shard_named(text, environment) == expected


def test_a_task_of_a_queue_is_told_that_it_has_a_part(
    run_cli: Run, write_manifest: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, told = (
        write_manifest({"prompt": "a circle"}),
        "--shard auto takes only this task's part",
    )
    assert told not in run_cli("plan", manifest).err
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert (
        run_cli("plan", manifest).err.count(
            f"SLURM_ARRAY_TASK_ID is set, but this run takes all jobs; {told}"
        )
        == 1
    )
    assert run_cli("generate", manifest, "--dry-run").err.count(told) == 1
    assert told not in run_cli("plan", manifest, "--shard", "1/1").err


@pytest.mark.parametrize(
    ("text", "environment", "says"),
    [
        ("3/2", {}, "is not I/N"),
        ("0/2", {}, "is not I/N"),
        ("half", {}, "is not I/N"),
        ("auto", {"RANK": "0", "WORLD_SIZE": "2"}, "works only in a task of a job scheduler"),
        ("auto", KUBERNETES, "not the number of tasks"),
        ("auto/8", SLURM, "SLURM_ARRAY_TASK_COUNT, which is 4"),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_ID": "9"}, "not one of 4 consecutive tasks"),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MAX": "12"}, "consecutive"),
        ("1/9999999999", {}, "is not I/N"),
        ("auto/2", {"JOB_COMPLETION_INDEX": "2"}, "not one of 2 consecutive tasks"),
        ("auto/2", {"JOB_COMPLETION_INDEX": "one"}, "not a number"),
    ],
)
def test_what_names_no_shard_is_refused(text: str, environment: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        shard_named(text, environment)


def a_photo(folder: Path, name: str) -> str:
    Image.new("RGB", (64, 64), f"#{digest.of_bytes(name.encode())[:6]}").save(
        folder / f"{name}.png"
    )
    return f"{name}.png"


def edits(folder: Path, photos: int = 4) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"{photo}-{edit}", "prompt": edit, "images": [a_photo(folder, f"p{photo}")]}
        for photo in range(photos)
        for edit in ("brighter", "darker")
    ]


def test_shards_share_a_folder_and_any_other_count_goes_on_there(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, fake_session: Any, tmp_path: Path
) -> None:
    entries = edits(tmp_path)
    manifest, out = write_manifest(*entries), tmp_path / "out"
    plans = [run_cli("plan", manifest, "--shard", f"{n}/2", "--json").json_lines[0] for n in (1, 2)]
    assert [plan["total"]["image_encodes"] for plan in plans] == [2, 2]
    assert plans[0]["shard"] == {"index": 1, "count": 2, "jobs": 4, "of_jobs": 8} | {
        "part": 0.5,
        "largest": 1.0,
    }
    ran = run_cli("generate", manifest, "--shard", "1/2", "-o", out, "--json")
    assert (ran.code, len(fake_session.ran)) == (0, 4)
    assert "hyimg report" in ran.err
    assert len(read_lines(out / "results-1-of-2.jsonl")) == 4
    assert not (out / "results.jsonl").exists()
    # One of three takes what the first of two has made, and all of it is there for the whole run.
    fake_session.ran.clear()
    assert run_cli("generate", manifest, "--shard", "1/3", "-o", out).code == 0
    made = len(fake_session.ran)
    assert run_cli("generate", manifest, "-o", out, "--json").code == 0
    assert len(fake_session.ran) == 4 > made > 0
    names = ("results.jsonl", "results-1-of-2.jsonl", "results-1-of-3.jsonl")
    lines = [line for name in names for line in read_lines(out / name)]
    assert sorted(line["custom_id"] for line in lines) == [one["custom_id"] for one in entries]
    fake_session.ran.clear()
    for n in range(1, 5):
        assert run_cli("generate", manifest, "--shard", f"{n}/4", "-o", out).code == 0
    assert fake_session.ran == []
    assert [
        path.name for path in out.iterdir() if path.name.startswith(".") and path.is_dir()
    ] == []


def test_readers_take_all_shards(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, tmp_path: Path
) -> None:
    manifest, out = write_manifest(*edits(tmp_path, photos=2)), tmp_path / "out"
    for shard in ("1/2", "2/2"):
        assert run_cli("generate", manifest, "--shard", shard, "-o", out).code == 0
    assert run_cli("report", out).code == 0
    page = (out / "report" / "data-0001.js").read_text()
    assert all(f'"{name}"' in page for name in ("0-brighter", "0-darker", "1-brighter"))
    assert run_cli("generate", manifest, "-o", tmp_path / "whole").code == 0
    found = run_cli("eval", "psnr", out, tmp_path / "whole", "--json")
    assert found.code == 0, found.err
    assert "1-darker" in found.out
    merged = run_cli("merge", out, "-o", tmp_path / "all", "--json")
    assert merged.json_lines[0]["merged"]["done"] == 4
    # Joined into itself, one journal is left.
    assert run_cli("merge", out, "-o", out, "--json").json_lines[0]["merged"]["done"] == 4
    assert [path.name for path in out.glob("results*")] == ["results.jsonl"]


def test_the_latest_attempt_counts_whichever_journal_it_is_in(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, tmp_path: Path
) -> None:
    manifest, out = write_manifest({"custom_id": "a", "prompt": "x"}), tmp_path / "out"
    assert run_cli("generate", manifest, "--shard", "1/1", "-o", out).code == 0
    journal = out / "results-1-of-1.jsonl"
    (line,) = read_lines(journal)
    journal.write_text(json.dumps(line | {"status": "failed", "outputs": []}) + "\n")
    assert run_cli("generate", manifest, "-o", out).code == 1
    assert run_cli("generate", manifest, "-o", out, "--retry-failed").code == 0
    assert read_lines(out / "results.jsonl")[0]["attempt"] == 2
    assert run_cli("generate", manifest, "--shard", "1/1", "-o", out).code == 0
    assert "1 done" in run_cli("merge", out, "-o", tmp_path / "all").err
    assert run_cli("generate", manifest, "--shard", "1/1", "-o", out, "--force").code == 0


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ((1, 2), (2, 2), False),
        ((1, 2), (1, 2), True),
        ((1, 2), (2, 3), True),
        ((1, 2), None, True),
        (None, (1, 2), True),
    ],
)
def test_only_shards_of_one_count_write_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Any, second: Any, is_refused: bool
) -> None:
    monkeypatch.setattr("hyimg_cli.journal.journal._DOOR_S", 0.1)
    with RunFolder(tmp_path, first) as one:
        begun = tmp_path / "outputs" / f".a.png.{2**22}.tmp"
        begun.touch()
        refused = pytest.raises(OutputFolderError, match="another run is writing")
        with refused if is_refused else nullcontext(), RunFolder(tmp_path, second) as other:
            other.append(Outcome("b", "failed", key="k"))
        one.append(Outcome("a", "failed", key="k"))
        assert begun.exists(), "another one may be writing it"
        assert RunFolder(tmp_path).is_locked
    assert not RunFolder(tmp_path).is_locked
    assert sorted(RunFolder(tmp_path).results()) == (["a"] if is_refused else ["a", "b"])
    with RunFolder(tmp_path, second):
        assert not begun.exists()


def test_folders_of_two_clusters_are_joined(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, fake_session: Any, tmp_path: Path
) -> None:
    entries = edits(tmp_path)
    manifest = write_manifest(*entries)
    first, second = (tmp_path / f"cluster-{n}" for n in (1, 2))
    for n, folder in enumerate((first, second), 1):
        run_cli("generate", manifest, "--shard", f"{n}/2", "--limit", "3", "-o", folder)
        (folder / f"results-{n}-of-2.jsonl").rename(folder / "results.jsonl")
    assert run_cli("generate", manifest, "--shard", "1/2", "-o", first).code == 0

    merged = run_cli("merge", first, "-o", tmp_path / "all")
    assert merged.code == 1
    assert "merged 1 folder into" in merged.err
    assert "4 done, 0 failed, 4 missing" in merged.err
    assert len(read_lines(tmp_path / "all/missing.jsonl")) == 4

    run_cli("generate", manifest, "--shard", "2/2", "-o", second)
    merged = run_cli("merge", first, second, "-o", tmp_path / "all", "--json")
    assert (merged.code, merged.json_lines[0]["merged"]["done"]) == (0, 8)
    lines = read_lines(tmp_path / "all/results.jsonl")
    assert [line["custom_id"] for line in lines] == [entry["custom_id"] for entry in entries]
    for line in lines:
        file = line["outputs"][0]
        assert digest.of_file(tmp_path / "all" / file["path"]) == file["sha256"]
    assert read_lines(tmp_path / "all/missing.jsonl") == []
    fake_session.ran.clear()
    assert run_cli("generate", manifest, "-o", tmp_path / "all").code == 0
    assert fake_session.ran == []


def test_what_is_missing_is_a_manifest_that_completes_the_folder(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    manifest = write_manifest(*edits(tmp_path), {"custom_id": "bad", "prompt": "fail"})
    run_cli("generate", manifest, "-o", tmp_path / "deep/er/one", "--select", "[0b]*")
    ran = run_cli("merge", tmp_path / "deep/er/one", "-o", tmp_path / "all")
    assert "2 done, 1 failed, 7 missing" in ran.err
    assert "--retry-failed" in ran.err
    fake_session.ran.clear()
    missing = tmp_path / "all/missing.jsonl"
    assert run_cli("generate", missing, "-o", tmp_path / "all", "--select", "[0-9]*").code == 0
    assert len(fake_session.ran) == 6
    fake_session.ran.clear()
    assert run_cli("generate", manifest, "-o", tmp_path / "all", "--select", "[0-9]*").code == 0
    assert fake_session.ran == []


def test_done_wins_over_failed_and_a_damaged_file_is_missing(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, tmp_path: Path
) -> None:
    manifest = write_manifest({"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "y"})
    for name in ("one", "two"):
        run_cli("generate", manifest, "-o", tmp_path / name)
    journal = tmp_path / "one/results.jsonl"
    failed = read_lines(journal)
    failed[0] |= {"status": "failed", "outputs": [], "key": "of a source that was not there"}
    journal.write_text("".join(json.dumps(line) + "\n" for line in failed))
    (tmp_path / "two/outputs/b.png").write_bytes(b"cut")
    assert run_cli("merge", tmp_path / "one", tmp_path / "two", "-o", tmp_path / "all").code == 0
    lines = read_lines(tmp_path / "all/results.jsonl")
    assert [(line["custom_id"], line["status"]) for line in lines] == [("a", "done"), ("b", "done")]
    ran = run_cli("merge", tmp_path / "two", "-o", tmp_path / "other", "--json")
    assert (ran.code, ran.json_lines[0]["merged"]["damaged"]) == (1, ["b"])
    assert not (tmp_path / "other/outputs/b.png").exists()


@pytest.mark.parametrize("fault", ["gone", "changed"])
def test_what_stands_beside_a_result_and_is_gone_or_changed_stays_away(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, tmp_path: Path, fault: str
) -> None:
    """The redraw, or the matte, of an edit whose result is whole; a film may have no sidecar."""
    run_cli("generate", write_manifest({"custom_id": "a", "prompt": "x"}), "-o", tmp_path / "one")
    journal = tmp_path / "one/results.jsonl"
    (line,) = read_lines(journal)
    edit: dict[str, Any] = {"sha256": {}}
    for kind in ("mask", "plain", "shown"):
        edit[kind] = f"outputs/a.{kind}.png"
        (tmp_path / "one" / edit[kind]).write_bytes(kind.encode())
        edit["sha256"][kind] = digest.of_bytes(kind.encode())
    journal.write_text(json.dumps(line | {"edit": edit}) + "\n")
    plain = tmp_path / "one" / edit["plain"]
    plain.unlink() if fault == "gone" else plain.write_bytes(b"another")
    ran = run_cli("merge", tmp_path / "one", "-o", tmp_path / "all")
    assert ran.code == 0, ran.err
    brought = sorted(path.name for path in (tmp_path / "all/outputs").iterdir())
    assert brought == ["a.mask.png", "a.png", "a.shown.png"]


def test_a_film_brings_its_sidecar_and_every_frame(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, tmp_path: Path
) -> None:
    run_cli("generate", write_manifest({"custom_id": "a", "prompt": "x"}), "-o", tmp_path / "one")
    journal, outputs = tmp_path / "one/results.jsonl", tmp_path / "one/outputs"
    (line,) = read_lines(journal)
    (outputs / "a.png").rename(outputs / "a.mp4")
    (outputs / "a.json").write_text("{}")
    (outputs / "a.frames").mkdir()
    frames = [f"{number:04}.png" for number in range(3)]
    for name in frames:
        (outputs / "a.frames" / name).write_text(name)
    film = {"path": "outputs/a.mp4", "frames_path": "outputs/a.frames", "num_frames": 3, "fps": 8}
    journal.write_text(json.dumps(line | {"outputs": [line["outputs"][0] | film]}) + "\n")
    ran = run_cli("merge", tmp_path / "one", "-o", tmp_path / "all")
    assert ran.code == 0, ran.err
    brought = tmp_path / "all/outputs"
    assert sorted(path.name for path in brought.iterdir()) == ["a.frames", "a.json", "a.mp4"]
    assert sorted(path.name for path in (brought / "a.frames").iterdir()) == frames
    assert [(brought / "a.frames" / name).read_text() for name in frames] == frames


def test_a_job_has_the_manifest_line_of_the_folder_that_did_it(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, tmp_path: Path
) -> None:
    run_cli("generate", write_manifest({"custom_id": "a", "prompt": "fail"}), "-o", tmp_path / "1")
    run_cli("generate", write_manifest({"custom_id": "a", "prompt": "x"}), "-o", tmp_path / "2")
    assert run_cli("merge", tmp_path / "1", tmp_path / "2", "-o", tmp_path / "all").code == 0
    assert [line["prompt"] for line in read_lines(tmp_path / "all/manifest.resolved.jsonl")] == [
        "x"
    ]
