"""Untrusted run folders with symbolic links: nothing outside is written or removed."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyimg_cli.cache.disk import SOURCE_IMAGES, DiskStore
from hyimg_cli.errors import OutputFolderError, StorageError
from hyimg_cli.files import replace_file, replacing
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.media.video import write_video
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Outcome

Run = Callable[..., Any]
JOB = {"prompt": "a red circle", "num_inference_steps": 1, "seed": 1, "size": "1:1"}
RECORD = {"format": 2, "model_fingerprint": "f", "job": JOB | {"model": "tiny-image"}}
KEY = digest.of_bytes(b"entry")


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder of somebody's, with names that a run would write or remove; it stays as it is."""
    folder = tmp_path / "victim"
    (folder / "thumbs").mkdir(parents=True)
    for name in ("file", "a.png", "index.js", "a.safetensors", ".x.png.1.tmp", "0001.png", KEY):
        (folder / name).write_text("precious, without a line end")
    (folder / "thumbs" / "a.jpg").write_text("precious")
    before = tree(folder)
    yield folder
    assert tree(folder) == before


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (
            (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else (b"", 0)
        )
        for path in folder.rglob("*")
    }


@pytest.fixture
def run_folder(
    run_cli: Run, fake_session: Any, tmp_path: Path, write_manifest: Any, write_picture: Any
) -> Path:
    """A finished run of an edit `a` and of `sub/b`; the manifest has one more."""
    write_picture("large.png", (400, 400))
    lines = [JOB | {"custom_id": name} for name in ("a", "sub/b", "sub/c")]
    del lines[0]["size"]
    lines[0]["images"] = ["large.png"]
    write_manifest(*lines[:2])
    for folder in ("out", "other"):
        assert run_cli("generate", "jobs.jsonl", "-o", folder, "--no-report").code == 0
    write_manifest(*lines)
    fake_session.ran.clear()
    (tmp_path / "a.json").write_text(
        json.dumps(RECORD | {"job": RECORD["job"] | {"custom_id": "a"}})
    )
    return tmp_path / "out"


def plant(place: Path, target: Path) -> None:
    """A link in the place of what is there."""
    if place.is_dir() and not place.is_symlink():
        place.rename(place.with_name(f"{place.name}.former"))
    else:
        place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


COMMANDS = {
    "generate": "generate jobs.jsonl -o out",
    "force": "generate jobs.jsonl -o out --force --no-resume",
    "merge": "merge other -o out",
    "replay": "replay a.json -o out --allow-changed",
    "report": "report out",
    "single": "report out --single-file",
}
# What is planted, where it leads, and which commands are refused; the others write nothing there.
PLANTED = {
    ".lock": ("file", "generate force merge replay"),
    "results.jsonl": ("file", "generate force merge replay"),
    "outputs": ("", "generate force merge replay"),
    "outputs/sub": ("", "generate force"),
    "latents": ("", "generate force merge replay"),
    "report": ("", "report"),
    "report/thumbs": ("thumbs", "report"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("planted", [*PLANTED, "report to nothing"])
def test_a_link_that_leads_out_is_refused(
    run_cli: Run, fake_session: Any, run_folder: Path, victim: Path, planted: str, command: str
) -> None:
    planted, _, is_dangling = planted.partition(" to ")
    target, refused = PLANTED[planted]
    target = "nothing" if is_dangling else target
    if command == "replay":
        for name in ("results.jsonl", "manifest.resolved.jsonl"):
            (run_folder / name).unlink()
    plant(run_folder / planted, victim / target)
    ran = run_cli(*COMMANDS[command].split())
    assert "Traceback" not in ran.err
    if command in refused.split():
        assert (ran.code, fake_session.ran) == (2, []), ran.err
        assert "error[output.link]: " in ran.err
        assert f"--> {os.path.join('out', planted)}" in ran.err
    elif planted == "report" and command in ("generate", "force"):
        assert ran.code == 0, ran.err
        assert "no report: " in ran.err
        assert "a link leads out of the folder" in ran.err


def test_a_link_that_stays_inside_and_one_to_the_folder_itself_are_the_users(
    run_cli: Run, run_folder: Path, tmp_path: Path
) -> None:
    (run_folder / "outputs" / "sub").rename(run_folder / "outputs" / "other")
    (run_folder / "outputs" / "sub").symlink_to("other")
    run_folder.rename(tmp_path / "elsewhere")
    run_folder.symlink_to(tmp_path / "elsewhere")
    ran = run_cli("generate", "jobs.jsonl", "-o", "out")
    assert (ran.code, "1 done, 0 failed, 2 skipped" in ran.err) == (0, True), ran.err
    assert (tmp_path / "elsewhere" / "outputs" / "other" / "c.png").is_file()


@pytest.mark.parametrize("target", ["file", "", "nothing-yet"])
def test_planted_temporary_names_are_removed_and_not_followed(
    run_cli: Run, run_folder: Path, victim: Path, target: str
) -> None:
    """Names with a process's number, which may be guessed."""
    names = ("run.json", "manifest.resolved.jsonl", "report.html", "report-single.html")
    names += ("outputs/a.png", "outputs/sub/c.png", "report/index.js", "report/data-0001.js")
    for name in names:
        path = run_folder / name
        plant(path.with_name(f".{path.name}.{os.getpid()}.tmp"), victim / target)
    assert run_cli("generate", "jobs.jsonl", "-o", "out", "--force", "--no-resume").code == 0
    # The page's thread wrote it, whose number is another.
    (run_folder / "report" / "data-0001.js").unlink()
    assert run_cli("report", "out").code == 0
    assert run_cli("report", "out", "--single-file").code == 0
    assert not list(run_folder.rglob("*.tmp"))
    for name in names:
        assert not (run_folder / name).is_symlink()


@pytest.mark.parametrize("target", ["file", "", "nothing-yet"])
def test_links_in_the_places_of_results_are_replaced(
    run_cli: Run, run_folder: Path, victim: Path, target: str
) -> None:
    for name in ("run.json", "report.html", "outputs/a.png", "outputs/a.json", "outputs/a.frames"):
        plant(run_folder / name, victim / target)
    assert run_cli("generate", "jobs.jsonl", "-o", "out", "--force", "--no-resume").code == 0
    assert not (run_folder / "outputs" / "a.png").is_symlink()


@pytest.mark.parametrize("suffix", [".mp4", ".json", ".frames"])
def test_a_film_is_written_over_no_link(tmp_path: Path, victim: Path, suffix: str) -> None:
    frames = np.zeros((3, 32, 32, 3), dtype=np.uint8)
    path = tmp_path / "out" / "a.mp4"
    place = path.with_suffix(suffix)
    plant(place.with_name(f".{place.name}.{os.getpid()}.tmp"), victim / "file")
    plant(place, victim)
    write_video(path, [frames], fps=8, frames_folder=path.with_suffix(".frames"))
    assert not path.is_symlink()
    assert len(list(path.with_suffix(".frames").iterdir())) == 3


def test_what_is_written_below_a_link_later_on_is_refused(tmp_path: Path, victim: Path) -> None:
    """Planted while the run goes: kept latents, files of former results, pieces of the run."""
    outcome = Outcome("sub/b", "done", key="k")
    with RunFolder(tmp_path / "out") as folder:
        folder.supersede({"sub/b": ["outputs/sub/a.png"]})
        plant(folder.folder / "outputs" / "sub", victim)
        plant(folder.folder / "latents", victim)
        for write in (
            lambda: folder.append(outcome),
            lambda: folder.bring("outputs/sub/a.png", tmp_path / "out" / ".lock"),
            lambda: folder.latents_for("a"),
            lambda: folder.drop_latents(["a"]),
        ):
            with pytest.raises(OutputFolderError) as caught:
                write()
            assert caught.value.code == "output.link"
        plant(folder.folder / "pieces", victim)
        with pytest.raises(OutputFolderError) as caught, RunFolder(folder.folder, piece=0):
            pass
        assert caught.value.code == "output.link"


def test_a_journal_that_becomes_a_link_is_not_written_through(tmp_path: Path, victim: Path) -> None:
    with RunFolder(tmp_path / "out") as folder:
        plant(tmp_path / "out" / "results.jsonl", victim / "file")
        with pytest.raises(StorageError, match="changed or replaced"):
            folder.append(Outcome("a", "failed", key="k"))


def test_the_texts_file_may_be_a_link_and_its_lock_may_not(
    run_cli: Run, fake_session: Any, write_manifest: Any, tmp_path: Path, victim: Path
) -> None:
    manifest = write_manifest({"custom_id": "a", "task": "t2v", "prompt": "a dog"})
    (tmp_path / "real.jsonl").touch()
    (tmp_path / "texts.jsonl").symlink_to("real.jsonl")
    assert run_cli("think", manifest, "-o", "texts.jsonl").code == 0
    assert (tmp_path / "texts.jsonl").is_symlink()
    assert json.loads((tmp_path / "real.jsonl").read_text())["custom_id"] == "a"
    plant(tmp_path / ".other.jsonl.lock", victim / "file")
    ran = run_cli("think", manifest, "-o", "other.jsonl")
    assert (ran.code, "error[output.link]" in ran.err) == (2, True), ran.err


def test_no_entry_of_the_cache_is_written_or_removed_behind_a_link(
    tmp_path: Path, victim: Path
) -> None:
    plant(tmp_path / "cache" / SOURCE_IMAGES, victim)
    store = DiskStore(tmp_path / "cache", 10**6)
    assert store.read(SOURCE_IMAGES, KEY) is None
    store.write(SOURCE_IMAGES, KEY, b"data")
    store.discard(SOURCE_IMAGES, KEY)
    store.clear()
    assert any("a link leads out of the folder" in note for note in store.take_notes())


@pytest.mark.parametrize("name", ["runs", "A", "B"])
def test_a_bench_writes_behind_no_link(
    run_cli: Run, tmp_path: Path, victim: Path, name: str
) -> None:
    plant(tmp_path / "bench" / name, victim)
    ran = run_cli("bench", "--compare", "prewarm", "-o", "bench", "--device", "cpu")
    assert ran.code in (2, 3), ran.err
    assert "a link leads out of the folder" in ran.err


def test_what_is_to_be_whole_is_begun_anew(tmp_path: Path) -> None:
    """A folder, or a file of a process that was killed, under the temporary name."""
    path = tmp_path / "a.txt"
    (tmp_path / f".a.txt.{os.getpid()}.tmp").mkdir()
    replace_file(path, b"x")
    (tmp_path / f".a.txt.{os.getpid()}.tmp").write_text("left")
    replace_file(path, b"y")
    assert path.read_bytes() == b"y"
    with replacing(path) as temporary:
        temporary.write_bytes(b"z")
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]
