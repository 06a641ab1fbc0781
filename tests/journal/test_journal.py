"""A killed, full, shared or foreign output folder loses nothing and mixes nothing up."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hyimg_cli.errors import JournalError, OutputFolderError, StorageError
from hyimg_cli.journal import resume as resuming
from hyimg_cli.journal.journal import RunFolder, files_of, outcome_to_json
from hyimg_cli.journal.keys import job_key
from hyimg_cli.journal.resume import ResumePolicy, Resumption
from hyimg_cli.settings.run import OutputConfig, RunConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import BranchTokens, Failure, Outcome, OutputFile, ReuseReport
from hyimg_cli.spec.job import Encoding, ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling

MakeJob = Callable[..., ImageJob]
PIXELS = b"not really a PNG"


def done(folder: RunFolder, custom_id: str, key: str = "key") -> Outcome:
    """An outcome with its picture in place."""
    path = folder.path_for(custom_id)
    path.write_bytes(PIXELS)
    picture = OutputFile(f"outputs/{path.name}", digest.of_bytes(PIXELS), "0" * 64, 64, 48, 7)
    return Outcome(custom_id, "done", key, outputs=(picture,))


def failed(custom_id: str, key: str = "key") -> Outcome:
    return Outcome(custom_id, "failed", key, error=Failure("source.missing", "no", "look", False))


def resume(
    run: RunFolder,
    jobs: Sequence[ImageJob],
    keys: Mapping[str, str],
    config: RunConfig | None = None,
    **policy: bool,
) -> Resumption:
    """What is left of jobs that have these keys."""
    config = config or RunConfig(OutputConfig(run.place))
    with patch.object(resuming, "job_keys", return_value=keys):
        return resuming.resume(run, jobs, config, ResumePolicy(**policy))


def results_file(folder: Path) -> Path:
    return folder / "results.jsonl"


def journal_of(folder: Path, *outcomes: str) -> None:
    with RunFolder(folder) as run:
        for custom_id in outcomes:
            run.append(done(run, custom_id))


# --- what a line says ---------------------------------------------------------------------------


def test_a_result_line_has_the_names_of_the_conventions() -> None:
    outcome = Outcome(
        "cat",
        "done",
        "k",
        outputs=(OutputFile("outputs/cat.png", "a", "b", 64, 48, 7),),
        denoise_steps=7,
        cot_token_ids=(1, 2),
        kv_reuse=ReuseReport(
            "hit", 10, 0, 5, (BranchTokens(reused=14, shared=0, computed=6, per_step=65),)
        ),
        warnings=("16-bit reduced to 8",),
        error=Failure("code", "message", "hint", True),
        metadata={"sku": "A17"},
        extra={"x_shelf": 3},
    )
    entry = json.loads(json.dumps(outcome_to_json(outcome)))
    assert entry["outputs"] == [
        {
            "path": "outputs/cat.png",
            "sha256": "a",
            "pixel_sha256": "b",
            "width": 64,
            "height": 48,
            "seed": 7,
        }
    ]
    assert entry["kv_reuse"] == {
        "status": "hit",
        "ar_prefill_tokens": 10,
        "ar_shared_tokens": 0,
        "ar_decode_tokens": 5,
        "branches": [{"reused": 14, "shared": 0, "computed": 6, "per_step": 65}],
        "reason": "",
        "ar_surplus_tokens": 0,
        "ar_taken_tokens": 0,
    }
    assert entry["error"] == {
        "code": "code",
        "message": "message",
        "hint": "hint",
        "retryable": True,
    }
    assert entry["x_shelf"] == 3
    assert entry["metadata"] == {"sku": "A17"}
    assert {"custom_id", "status", "cot_text", "think_truncated", "timings_s", "attempt"} <= set(
        entry
    )
    assert "extra" not in entry


# --- append and read back -----------------------------------------------------------------------


def test_the_last_line_of_an_id_counts(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "out") as run:
        run.append(failed("cat"))
        run.append(failed("dog"))
        run.append(done(run, "cat"))
    results = RunFolder(tmp_path / "out").results()
    assert {name: entry["status"] for name, entry in results.items()} == {
        "cat": "done",
        "dog": "failed",
    }
    assert len(results_file(tmp_path / "out").read_text().splitlines()) == 3


def test_a_folder_without_results_has_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "none").results() == {}


@settings(max_examples=40)
@given(share=st.floats(0, 1))
def test_wherever_a_kill_cuts_the_journal_the_lines_before_it_stand(
    share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("out")
    journal_of(folder, "a", "b", "c")
    whole = results_file(folder).read_bytes()
    kept = whole[: round(share * len(whole))]
    results_file(folder).write_bytes(kept)

    # A line counts once all of its JSON is there, be it without its newline.
    ends = [whole.index(line) + len(line) for line in whole.splitlines()]
    expected = [name for name, end in zip("abc", ends, strict=True) if end <= len(kept)]
    assert list(RunFolder(folder).results()) == expected
    journal_of(folder, "after")
    assert list(RunFolder(folder).results()) == [*expected, "after"]


@settings(max_examples=40)
@given(tail=st.binary(max_size=30).filter(lambda tail: b"\n" not in tail))
@example(tail=b'{"custom_id": 1}')
@example(tail=b"\0" * 30)
@example(tail=b"[" * 30)
def test_whatever_stands_behind_the_last_line_is_cut_off(
    tail: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("out")
    journal_of(folder, "a", "b")
    with open(results_file(folder), "ab") as file:
        file.write(tail)
    assert list(RunFolder(folder).results()) == ["a", "b"]
    journal_of(folder, "c")
    assert list(RunFolder(folder).results()) == ["a", "b", "c"]


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    journal_of(tmp_path, "a", "b")
    path = results_file(tmp_path)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    journal_of(tmp_path, "c")
    assert list(RunFolder(tmp_path).results()) == ["a", "b", "c"]


def test_a_torn_line_is_read_over_without_the_lock_and_cut_off_with_it(tmp_path: Path) -> None:
    journal_of(tmp_path, "a")
    path = results_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"custom_id": "b", "sta')
    assert list(RunFolder(tmp_path).results()) == ["a"]
    assert path.read_bytes() != whole
    with RunFolder(tmp_path):
        assert path.read_bytes() == whole


def test_a_damaged_line_before_the_end_is_named(tmp_path: Path) -> None:
    journal_of(tmp_path, "a", "b")
    path = results_file(tmp_path)
    path.write_bytes(b"{oops\n" + path.read_bytes())
    with pytest.raises(OutputFolderError) as caught:
        RunFolder(tmp_path).results()
    assert caught.value.where == f"{path}:1"
    assert caught.value.hint


def test_odd_characters_survive(tmp_path: Path) -> None:
    text = "line\u2028end \N{GRINNING FACE} \0 half \ud800"
    with RunFolder(tmp_path) as run:
        run.append(replace(failed("a"), cot_text=text))
    assert RunFolder(tmp_path).results()["a"]["cot_text"] == text


def test_a_line_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    """A process that kills itself right after it has appended loses nothing."""
    program = """
import os, signal, sys
from pathlib import Path
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.spec.events import Outcome
run = RunFolder(Path(sys.argv[1])).__enter__()
run.append(Outcome("a", "failed", "key"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(RunFolder(tmp_path).results()) == ["a"]
    journal_of(tmp_path, "b")  # the lock went with the process


# --- somebody else at the journal ---------------------------------------------------------------


def rewritten(path: Path, data: bytes) -> None:
    """Replaced as `sed -i` and most editors do: written beside it, then renamed."""
    other = path.with_name("rewritten")
    other.write_bytes(data)
    other.replace(path)


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


TOUCHES: dict[str, Callable[[Path], Any]] = {
    "removed": Path.unlink,
    "renamed": lambda path: path.rename(path.with_name("saved.jsonl")),
    "rewritten": lambda path: rewritten(path, path.read_bytes()),
    "an older copy": lambda path: rewritten(path, path.read_bytes()[: -len("newest line")]),
    "emptied by rename": lambda path: rewritten(path, b""),
    "another file": lambda path: rewritten(path, b"notes of mine\nand more"),
    "truncated": lambda path: path.write_bytes(b""),
    "blanked": lambda path: path.write_bytes(b" " * path.stat().st_size),
    "saved in place": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "scribbled on": lambda path: path.write_bytes(b"scribble"),
    "appended to": lambda path: path.write_bytes(path.read_bytes() + b"half a li"),
    "a folder": put_a_folder,
    "a pipe": put_a_pipe,
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_a_journal_that_is_touched_stops_the_run_and_is_left_as_it_is(
    tmp_path: Path, touch: str
) -> None:
    path = results_file(tmp_path)
    with RunFolder(tmp_path) as run:
        run.append(failed("a"))
        run.append(done(run, "b"))
        TOUCHES[touch](path)
        left = path.read_bytes() if path.is_file() else None
        for write in (lambda: run.append(done(run, "c")), run.confirm):
            with pytest.raises(JournalError) as caught:
                write()
    error = caught.value
    assert (error.code, error.exit_code, error.where) == ("storage.journal", 3, str(path))
    assert "run the same command again" in error.hint
    assert (path.read_bytes() if path.is_file() else None) == left


def test_what_is_gone_after_the_last_line_is_told(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.append(failed("a"))
        results_file(tmp_path).unlink()
        with pytest.raises(JournalError, match=r"results\.jsonl was removed"):
            run.confirm()
    assert not results_file(tmp_path).exists()


STEPS = st.sampled_from(["append", "append", *TOUCHES])


@settings(max_examples=60)
@given(steps=st.lists(STEPS, max_size=8), before=st.integers(0, 2))
def test_every_touch_is_noticed_before_anything_is_written_behind_it(
    steps: list[str], before: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("out")
    path = results_file(folder)
    journal_of(folder, *(f"before-{n}" for n in range(before)))
    with RunFolder(folder) as run:
        found = path.read_bytes()
        for number, step in enumerate(steps):
            if step != "append":
                TOUCHES[step](path)
                break
            run.append(done(run, f"job-{number}"))
            lines = path.read_bytes()
            assert lines.startswith(found), "what was there stays"
            assert json.loads(lines.splitlines()[-1])["custom_id"] == f"job-{number}"
            found = lines
        left = path.read_bytes() if path.is_file() else None
        if left != found:
            with pytest.raises(JournalError):
                run.append(done(run, "last"))
            assert (path.read_bytes() if path.is_file() else None) == left


def test_a_run_whose_lock_another_has_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(tmp_path) as first:
        (tmp_path / ".lock").unlink()
        first.append(failed("a"))
        monkeypatch.setattr(os, "getpid", lambda: 1)  # as another process
        with RunFolder(tmp_path) as second:
            for write in (lambda: first.append(failed("b")), first.confirm):
                with pytest.raises(StorageError, match="another run is writing") as caught:
                    write()
                assert caught.value.code == "storage.in-use"
            second.append(failed("c"))
    assert list(RunFolder(tmp_path).results()) == ["a", "c"]


def test_a_folder_that_was_moved_is_told_and_not_made_again(tmp_path: Path) -> None:
    out, moved = tmp_path / "out", tmp_path / "moved"
    with RunFolder(out) as run:
        run.append(failed("a"))
        outcome = done(run, "b")
        out.rename(moved)
        with pytest.raises(StorageError, match="the folder does not exist") as caught:
            run.append(outcome)
        assert (caught.value.code, caught.value.where) == ("storage.gone", str(out))
    assert not out.exists()
    assert list(RunFolder(moved).results()) == ["a"]


# --- the folder ---------------------------------------------------------------------------------


def test_run_and_resolved_jobs_are_written_whole(tmp_path: Path, make_job: MakeJob) -> None:
    with RunFolder(tmp_path / "a" / "b") as run:
        run.write_run({"versions": {"python": "3"}})
        run.write_resolved([make_job("cat"), make_job("dog", images=("in/a.png",))])
        run.write_run({"versions": {"python": "4"}})
    folder = tmp_path / "a" / "b"
    assert json.loads((folder / "run.json").read_text()) == {"versions": {"python": "4"}}
    lines = (folder / "manifest.resolved.jsonl").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == ["cat", "dog"]
    names = {path.name for path in folder.iterdir()}
    assert names == {"run.json", "manifest.resolved.jsonl", "results.jsonl", "outputs", ".lock"}


def test_the_second_run_in_a_folder_is_told_of_the_first(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as first:
        with (
            pytest.raises(OutputFolderError, match=f"process {os.getpid()}") as caught,
            RunFolder(tmp_path),
        ):
            raise AssertionError("two runs in one folder")
        assert caught.value.code == "output.in-use"
        first.append(failed("a"))
        assert list(RunFolder(tmp_path).results()) == ["a"], "reading needs no lock"
    with RunFolder(tmp_path):
        pass


def test_what_a_killed_run_had_not_named_yet_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    leftovers = [tmp_path / "outputs" / ".cat.png.123.tmp", tmp_path / ".run.json.123.tmp"]
    others = [tmp_path / "outputs" / "dog.png", tmp_path / "notes.tmp", tmp_path / ".mine.tmp"]
    for path in leftovers + others:
        path.touch()
    with RunFolder(tmp_path):
        pass
    assert not any(path.exists() for path in leftovers)
    assert all(path.exists() for path in others)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    for folder in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(OutputFolderError) as caught, RunFolder(folder):
            raise AssertionError("a file was taken for a folder")
        assert caught.value.code == "output.not-a-folder"


@pytest.mark.parametrize("custom_id", ["../x", "a/../b", "/a", "", ".hidden", "a\0b", "a//b"])
def test_no_unchecked_id_becomes_a_path(tmp_path: Path, custom_id: str) -> None:
    with pytest.raises(AssertionError):
        RunFolder(tmp_path).path_for(custom_id)


def test_an_id_with_folders_has_its_file_in_them(tmp_path: Path, make_job: MakeJob) -> None:
    folder = RunFolder(tmp_path)
    assert folder.latents_for("a/b/c").parent == tmp_path / "latents"
    assert folder.latents_for("a/b") != folder.latents_for("a_b")
    folder.make_places([make_job("a/b/c"), make_job("a/d"), make_job("e")])
    folder.path_for("a/b/c").with_name(".c.png.123.tmp").touch()
    (tmp_path / "outputs" / "a.frames").mkdir()
    frame = tmp_path / "outputs" / "a.frames" / ".x.123.tmp"
    frame.touch()
    with folder:
        assert [path.name for path in folder.path_for("a/b/c").parent.iterdir()] == []
    assert frame.exists()  # a folder of frames is whole or not at all: nobody looks into it


@pytest.mark.parametrize("obstacle", ["file", "link", "link above"])
def test_no_place_is_made_elsewhere(tmp_path: Path, make_job: MakeJob, obstacle: str) -> None:
    outputs, elsewhere = tmp_path / "out" / "outputs", tmp_path / "elsewhere"
    outputs.mkdir(parents=True)
    elsewhere.mkdir()
    place = outputs / ("a/b" if obstacle == "link above" else "a")
    if obstacle == "file":
        place.touch()
    elif obstacle == "link":
        place.symlink_to(elsewhere)
    else:
        (outputs / "a").symlink_to(elsewhere)
    with pytest.raises(OutputFolderError) as caught:
        RunFolder(tmp_path / "out").make_places([make_job("a/b/c")])
    assert caught.value.code in ("output.not-a-folder", "output.link")
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_read_only_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    """Simulated, for the superuser may write anywhere."""

    def refuse(*args: Any, **more: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageError) as caught, RunFolder(tmp_path / "out"):
        raise AssertionError("nothing could be written")
    assert caught.value.code == "storage.read-only"
    assert caught.value.exit_code == 3
    assert caught.value.where == str(tmp_path / "out")


class FullDisk:
    """`os.write` that puts down `room` bytes more and then says that the disk is full."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def __call__(self, descriptor: int, data: Any) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(data)[: self.room]
        self.room -= len(part)
        return self._write(descriptor, part)


@pytest.mark.parametrize("room", [0, 1, 50])
def test_a_full_disk_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    with RunFolder(tmp_path) as run:
        run.append(failed("a"))
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", FullDisk(room))
            with pytest.raises(StorageError) as caught:
                run.append(failed("b"))
        assert caught.value.code == "storage.full"
        run.append(failed("c"))
    assert list(RunFolder(tmp_path).results()) == ["a", "c"]


def test_a_disk_that_is_found_full_at_fsync_leaves_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunFolder(tmp_path) as run:
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError, match="full"):
            run.append(failed("a"))
        assert run.results() == {}
        with pytest.raises(StorageError, match="full"):
            run.write_run({"a": 1})
        monkeypatch.undo()
        assert not list(tmp_path.glob(".*.tmp"))
        assert not (tmp_path / "run.json").exists()


def test_a_full_disk_keeps_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder(tmp_path) as run:
        run.write_run({"run": 1})
        monkeypatch.setattr(os, "write", FullDisk(3))
        with pytest.raises(StorageError):
            run.write_run({"run": 2})
    assert json.loads((tmp_path / "run.json").read_text()) == {"run": 1}
    assert not list(tmp_path.glob(".*.tmp"))


# --- keys ---------------------------------------------------------------------------------------


def key_of(job: ImageJob, **changes: Any) -> str:
    inputs: dict[str, Any] = {
        "source_digests": ["d1", "d2"],
        "model_fingerprint": "m",
        "pixel_settings": {"dtype": "float32"},
    }
    return job_key(job, **(inputs | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "a dog"},
        {"seed": 2},
        {"size": SizeRequest(64, 64)},
        {"num_inference_steps": 5},
        {"guidance_scale": 4.0},
        {"flow_shift": 2.0},
        {"bot_task": "none"},
        {"bot_task": "recaption"},
        {"ar_seed": 2},
        {"text": TextSampling(0.0, 1024, 0.95, 64)},
        {"cot_text": "a"},
        {"cot_token_ids": (1,)},
        {"drop_think": True},
        {"use_system_prompt": "en_unified"},
        {"use_system_prompt": "custom", "system_prompt": "Be bold."},
    ],
)
def test_what_changes_pixels_changes_the_key(make_job: MakeJob, changes: dict[str, Any]) -> None:
    assert key_of(make_job(**changes)) != key_of(make_job())


def test_a_dynamic_system_prompt_hangs_on_the_bot_task(make_job: MakeJob) -> None:
    told = {"cot_text": "a", "use_system_prompt": "dynamic"}
    assert key_of(make_job(**told, bot_task="think")) != key_of(make_job(**told, bot_task="none"))


@pytest.mark.parametrize(
    "inputs",
    [
        {"source_digests": ["d2", "d1"]},
        {"source_digests": ["d1"]},
        {"model_fingerprint": "n"},
        {"pixel_settings": {"dtype": "bfloat16"}},
    ],
)
def test_sources_model_and_precision_change_the_key(make_job: MakeJob, inputs: Any) -> None:
    assert key_of(make_job(), **inputs) != key_of(make_job())


def test_names_places_and_metadata_do_not_change_the_key(make_job: MakeJob) -> None:
    job = make_job(images=("in/a.png",))
    same = replace(
        job,
        custom_id="other",
        images=("elsewhere/b.png",),
        model="/copy/of/it",
        metadata_json='{"a": 1}',
        extra_json='{"x_a": 1}',
        source_line="other.jsonl:9",
        user_fields=frozenset({"seed"}),
    )
    assert key_of(same) == key_of(job)


def test_settings_that_the_job_does_not_use_do_not_change_the_key(make_job: MakeJob) -> None:
    greedy = TextSampling(0.0, 1, 1.0, 5)
    for changes in ({"bot_task": "none"}, {"cot_text": "a"}, {"cot_token_ids": (1,)}):
        assert key_of(make_job(**changes, text=greedy)) == key_of(make_job(**changes))


# --- resume -------------------------------------------------------------------------------------


@pytest.fixture
def sorted_out(tmp_path: Path, make_job: MakeJob) -> Callable[..., Resumption]:
    """A folder where a, b are done and c, d failed; then a resume over a to e."""
    with RunFolder(tmp_path) as run:
        for name in "ab":
            run.append(done(run, name))
        for name in "cd":
            run.append(failed(name))

    def sort(**options: Any) -> Resumption:
        keys = dict.fromkeys("abcde", "key") | options.pop("keys", {})
        return resume(RunFolder(tmp_path), [make_job(name) for name in "abcde"], keys, **options)

    return sort


def ids(resumption: Resumption) -> tuple[str, str, str]:
    running = "".join(job.custom_id for job in resumption.to_run)
    return running, "".join(resumption.done), "".join(resumption.failed_before)


def test_done_is_skipped_and_failed_is_left_alone(sorted_out: Callable[..., Resumption]) -> None:
    assert ids(sorted_out()) == ("e", "ab", "cd")


def test_failed_runs_again_when_asked(sorted_out: Callable[..., Resumption]) -> None:
    assert ids(sorted_out(retry_failed=True)) == ("cde", "ab", "")


def test_another_key_is_refused_unless_forced(sorted_out: Callable[..., Resumption]) -> None:
    with pytest.raises(OutputFolderError) as caught:
        sorted_out(keys={"b": "other"})
    assert caught.value.code == "output.other-job"
    assert '"b"' in caught.value.what
    assert caught.value.exit_code == 2
    assert ids(sorted_out(keys={"b": "other"}, force=True)) == ("be", "a", "cd")


def test_a_failed_job_that_was_mended_is_a_new_job(sorted_out: Callable[..., Resumption]) -> None:
    assert ids(sorted_out(keys={"c": "mended"})) == ("ce", "ab", "d")


@pytest.mark.parametrize("damage", ["removed", "changed", "no outputs"])
def test_a_picture_that_is_not_as_written_is_made_again(
    sorted_out: Callable[..., Resumption], tmp_path: Path, damage: str
) -> None:
    picture = tmp_path / "outputs" / "a.png"
    if damage == "removed":
        picture.unlink()
    elif damage == "changed":
        picture.write_bytes(b"other")
    else:
        path = results_file(tmp_path)
        path.write_text(path.read_text() + '{"custom_id": "a", "status": "done", "key": "key"}\n')
    assert ids(sorted_out()) == ("ae", "b", "cd")


def test_without_resume_a_folder_with_results_is_refused_unless_forced(
    sorted_out: Callable[..., Resumption], tmp_path: Path, make_job: MakeJob
) -> None:
    with pytest.raises(OutputFolderError) as caught:
        sorted_out(resume=False)
    assert caught.value.code == "output.not-empty"
    assert ids(sorted_out(resume=False, force=True)) == ("abcde", "", "")
    fresh = resume(RunFolder(tmp_path / "new"), [make_job("a")], {"a": "key"}, resume=False)
    assert ids(fresh) == ("a", "", "")


STATES = st.sampled_from(["new", "done", "failed", "torn"])


@settings(max_examples=40)
@given(states=st.lists(STATES, max_size=6), retry=st.booleans())
def test_every_job_is_sorted_exactly_once(
    states: list[str], retry: bool, tmp_path_factory: pytest.TempPathFactory, make_job: MakeJob
) -> None:
    folder = tmp_path_factory.mktemp("out")
    jobs = [make_job(f"job-{index}") for index in range(len(states))]
    with RunFolder(folder) as run:
        for job, state in zip(jobs, states, strict=True):
            if state in ("done", "torn"):
                run.append(done(run, job.custom_id))
            if state == "torn":
                run.path_for(job.custom_id).write_bytes(b"half a pict")
            if state == "failed":
                run.append(failed(job.custom_id))
    found = resume(run, jobs, {job.custom_id: "key" for job in jobs}, retry_failed=retry)
    names = [*(job.custom_id for job in found.to_run), *found.done, *found.failed_before]
    assert sorted(names) == sorted(job.custom_id for job in jobs)
    by_state = dict(zip((job.custom_id for job in jobs), states, strict=True))
    assert all(by_state[name] == "done" for name in found.done)
    assert all(by_state[name] == "failed" for name in found.failed_before)
    assert not (retry and found.failed_before)
    assert {"done"}.isdisjoint(by_state[job.custom_id] for job in found.to_run)


# --- names by a template --------------------------------------------------------------------------


def made(run: RunFolder, job: ImageJob, key: str = "key") -> None:
    """The job's picture under its name, and its line."""
    path = run.place_for(job, job.encoding.suffix)
    path.write_bytes(PIXELS)
    relative = path.relative_to(run.folder).as_posix()
    picture = OutputFile(relative, digest.of_bytes(PIXELS), "0" * 64, 64, 48, 7)
    run.append(Outcome(job.custom_id, "done", key, outputs=(picture,)))


def outputs_in(folder: Path) -> set[str]:
    outputs = folder / "outputs"
    return {str(path.relative_to(outputs)) for path in outputs.rglob("*") if path.is_file()}


def test_a_file_is_found_by_its_line(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("a", file_name="in/{custom_id}-0007")
    with RunFolder(tmp_path) as run:
        made(run, job)
    assert outputs_in(tmp_path) == {"in/a-0007.png"}
    assert resume(run, [job], {"a": "key"}).done == ["a"]
    (tmp_path / "outputs/in/a-0007.png").unlink()
    assert resume(run, [job], {"a": "key"}).to_run == [job]


def test_another_name_in_a_used_folder_is_told(tmp_path: Path, make_job: MakeJob) -> None:
    jobs = [make_job(name) for name in "abc"]
    with RunFolder(tmp_path) as run:
        made(run, jobs[0])
        run.append(failed("b"))
    named = [replace(job, file_name="new-{custom_id}") for job in jobs]
    keys = dict.fromkeys("ab", "key")
    with pytest.raises(OutputFolderError) as caught:
        resume(run, named, keys)
    assert caught.value.code == "output.other-job"
    assert "1 of 3 jobs differs (name: 1)" in caught.value.what
    assert "--force" in caught.value.hint
    found = resume(run, named, keys, force=True)
    assert (found.to_run, found.failed_before) == ([named[0], named[2]], ["b"])
    assert found.former == {"a": ["outputs/a.png"]}


def test_what_is_replaced_goes_once_the_new_line_is_there(
    tmp_path: Path, make_job: MakeJob
) -> None:
    """Names that are swapped take each other's place, in any order, and none is lost."""
    jobs = [make_job("a", file_name="1"), make_job("b", file_name="2"), make_job("c")]
    with RunFolder(tmp_path) as run:
        for job in jobs:
            made(run, job)
    swapped = [replace(jobs[0], file_name="2"), replace(jobs[1], file_name="3"), jobs[2]]
    keys = dict.fromkeys("abc", "key")
    with RunFolder(tmp_path) as run:
        found = resume(run, swapped, keys, force=True)
        assert found.done == ["c"]
        run.supersede(found.former)
        made(run, swapped[0])
        assert outputs_in(tmp_path) == {"2.png", "c.png"}
    # Killed here: the line of b still names a file that is a's by now.
    with RunFolder(tmp_path) as run:
        found = resume(run, swapped, keys, force=True)
        assert (found.to_run, found.former) == ([swapped[1]], {"b": []})
        run.supersede(found.former)
        made(run, swapped[1])
    assert outputs_in(tmp_path) == {"2.png", "3.png", "c.png"}
    assert resume(run, swapped, keys).done == ["a", "b", "c"]


def test_a_job_made_again_under_its_name_keeps_its_file(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("a")
    for key in ("key", "another"):
        with RunFolder(tmp_path) as run:
            run.supersede(resume(run, [job], {"a": key}, force=True).former)
            made(run, job, key)
    assert outputs_in(tmp_path) == {"a.png"}


def test_a_failed_attempt_takes_no_file_with_it(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("a")
    with RunFolder(tmp_path) as run:
        made(run, job)
        run.supersede(resume(run, [replace(job, file_name="b")], {"a": "key"}, force=True).former)
        run.append(failed("a"))
        assert outputs_in(tmp_path) == {"a.png"}


def test_everything_of_a_film_goes(tmp_path: Path) -> None:
    film = {"path": "outputs/a.mp4", "frames_path": "outputs/a.frames"}
    assert files_of(film) == ["outputs/a.mp4", "outputs/a.json", "outputs/a.frames"]
    with RunFolder(tmp_path) as run:
        for name in ("a.mp4", "a.json", "a.frames/0000.png", "b.mp4"):
            (tmp_path / "outputs" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "outputs" / name).touch()
        run.supersede({"a": files_of(film)})
        run.append(done(run, "a"))
    assert outputs_in(tmp_path) == {"a.png", "b.mp4"}


@pytest.mark.parametrize("name", ["path", "frames_path"])
@pytest.mark.parametrize("path", ["../kept", "/kept", "outputs/../kept", "", "a\0b", 7])
def test_a_line_of_a_stranger_removes_nothing_elsewhere(
    tmp_path: Path, make_job: MakeJob, name: str, path: Any
) -> None:
    run = RunFolder(tmp_path)
    output = {"path": "outputs/a.mp4", "frames_path": "outputs/a.frames"} | {name: path}
    entry = {"custom_id": "a", "status": "done", "key": "k", "outputs": [output]}
    results_file(tmp_path).write_text(json.dumps(entry) + "\n")
    what = f"not a job's result: (outputs|{name}) is"
    with pytest.raises(OutputFolderError, match=what) as caught:
        resume(run, [make_job("a")], {"a": "key"}, force=True)
    assert (caught.value.code, caught.value.where) == (
        "output.damaged-journal",
        f"{results_file(tmp_path)}:1",
    )


@pytest.mark.parametrize("path", ["outputs", "report.html"])
def test_only_files_below_outputs_are_removed(tmp_path: Path, make_job: MakeJob, path: str) -> None:
    output = {"path": path, "frames_path": path}
    entry = {"custom_id": "a", "status": "done", "key": "k", "outputs": [output]}
    results_file(tmp_path).write_text(json.dumps(entry) + "\n")
    found = resume(RunFolder(tmp_path), [make_job("a")], {"a": "key"}, force=True)
    assert found.former == {"a": []}
    entry["outputs"] = [output | {"path": "outputs/a.mp4"}]
    results_file(tmp_path).write_text(json.dumps(entry) + "\n")
    found = resume(RunFolder(tmp_path), [make_job("a")], {"a": "key"}, force=True)
    assert found.former == {"a": ["outputs/a.mp4", "outputs/a.json"]}


def test_the_file_of_another_manifests_job_is_not_written_over(
    tmp_path: Path, make_job: MakeJob
) -> None:
    """Not even with --force: its line would name a picture that is not its own."""
    with RunFolder(tmp_path) as run:
        made(run, make_job("a", file_name="Cat-64"))
    for name in ("cat-64", "CAT-64"):
        job = make_job("b", file_name=name)
        for force in (False, True):
            with pytest.raises(OutputFolderError) as caught:
                resume(run, [job], {}, force=force)
            assert caught.value.code == "output.other-file"
            assert 'outputs/Cat-64.png would be the file of "b", but is that of "a"' in (
                caught.value.what
            )
    assert resume(run, [make_job("b", file_name="cat-65")], {}).to_run


def test_formats_are_of_the_key_and_png_is_as_before(make_job: MakeJob) -> None:
    job = make_job("a")
    keys = {
        job_key(replace(job, encoding=encoding), [], "model", {})
        for encoding in (
            Encoding(),
            Encoding("jpeg", 95),
            Encoding("jpeg", 94),
            Encoding("webp", 95),
            Encoding("webp"),
        )
    }
    assert len(keys) == 5
    assert job_key(replace(job, file_name="other"), [], "model", {}) in keys
    # Written down once: keys of folders from before there were formats.
    known = "7b1b43774954"
    assert job_key(job, [], "model", {}).startswith(known)
