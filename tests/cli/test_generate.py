"""`generate` with a session that needs no model: files, journal, JSON and exit codes."""

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest

from hyimg_cli.errors import Interrupted
from hyimg_cli.files import remove
from hyimg_cli.report.run_page import LivePage

GOOD = [{"custom_id": f"job-{n}", "prompt": "a circle", "seed": n} for n in range(4)]
Run = Callable[..., Any]
Write = Callable[..., Path]
ReadLines = Callable[[Path], list[dict[str, Any]]]
pytestmark = pytest.mark.usefixtures("fake_session")


def ids(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["custom_id"] for entry in entries]


def summary_of(ran: Any) -> dict[str, Any]:
    summary: dict[str, Any] = ran.json_lines[-1]["summary"]
    return summary


def test_a_run_leaves_its_whole_folder(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, tmp_path: Path
) -> None:
    ran = run_cli("generate", write_manifest(*GOOD))
    out = tmp_path / "runs" / "jobs"
    assert ran.code == 0
    assert ran.out == ""
    assert ids(read_lines(out / "results.jsonl")) == ids(GOOD)
    assert ids(read_lines(out / "manifest.resolved.jsonl")) == ids(GOOD)
    assert sorted(p.name for p in (out / "outputs").iterdir()) == [f"{n}.png" for n in ids(GOOD)]


def test_the_page_says_that_a_toy_drew_for_who_did_not_name_it(
    run_cli: Run, write_manifest: Write, tmp_path: Path
) -> None:
    manifest = write_manifest(*GOOD)
    run_cli("generate", manifest, "-o", "out")
    assert "name a checkpoint with --model" in (tmp_path / "out/report/index.js").read_text()
    run_cli("generate", manifest, "-o", "named", "--model", "tiny-image")
    assert "toy that" not in (tmp_path / "named/report/index.js").read_text()


def test_run_json_says_what_ran_and_where_settings_came_from(
    run_cli: Run, write_manifest: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYIMG_GUIDANCE_SCALE", "2.5")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    recipe = tmp_path / "r.toml"
    recipe.write_text("[sampling]\nflow_shift = 1.5\n")
    arguments = ("--recipe", recipe, "--steps", "3", "-o", tmp_path / "out")
    arguments += ("--cache-dir", tmp_path / "kept")
    assert run_cli("generate", write_manifest(*GOOD), *arguments).code == 0
    text = (tmp_path / "out" / "run.json").read_text()
    info = json.loads(text)
    flags = info["flags"]
    assert flags["num_inference_steps"] == {"value": 3, "origin": "flag"}
    assert flags["guidance_scale"] == {"value": 2.5, "origin": "environment"}
    assert flags["flow_shift"] == {"value": 1.5, "origin": "recipe"}
    assert flags["kv_reuse"]["origin"] == "default"
    assert {"python", "torch", "transformers", "hyimg"} <= info["versions"].keys()
    assert info["hardware"]["cores"] >= 1
    assert info["hardware"]["cpu"]
    assert len(info["manifest"]["digest"]) == 64
    assert len(info["models"]["tiny-image"]) == 64
    assert flags["cache_dir"] == {"value": "kept", "origin": "flag"}
    assert str(tmp_path) not in text
    assert "hf_secret" not in text


def test_json_is_the_result_lines_and_a_summary(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, tmp_path: Path
) -> None:
    ran = run_cli("generate", write_manifest(*GOOD), "--json")
    *results, last = ran.json_lines
    assert results == read_lines(tmp_path / "runs/jobs/results.jsonl")
    assert last["output_dir"] == "runs/jobs"
    expected = {"done": 4, "failed": 0, "invalid": 0, "skipped": 0, "left": 0, "load_s": 0.5}
    expected |= {"edits": 0, "unchanged": 0, "whole": 0, "gated": 0, "lossy": 0}
    expected |= {"prompt_tokens_computed": 0, "prompt_tokens_reused": 0}
    assert expected.items() <= last["summary"].items()
    assert last["summary"]["seconds_per_picture"] > 0
    times = {"prewarm_s", "encode_s", "compile_s", "pictures_s", "seconds_per_picture"}
    assert last["summary"].keys() == expected.keys() | times


def test_a_failed_job_leaves_the_others_and_exits_1(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, tmp_path: Path
) -> None:
    ran = run_cli("generate", write_manifest({"prompt": "fail"}, *GOOD), "--json")
    assert ran.code == 1
    assert (summary_of(ran)["done"], summary_of(ran)["failed"]) == (4, 1)
    assert "--retry-failed" in ran.err
    first = read_lines(tmp_path / "runs/jobs/results.jsonl")[0]
    assert (first["status"], first["error"]["code"]) == ("failed", "job.fake")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--select", "job-[13]"], ["job-1", "job-3"]),
        (["--limit", "2"], ["job-0", "job-1"]),
        (["--shard", "2/3"], ["job-3"]),
        (["--shard", "1/3"], ["job-0", "job-1"]),
        (["--shard", "1/3", "--limit", "1"], ["job-0"]),
    ],
)
def test_selection(
    run_cli: Run,
    write_manifest: Write,
    fake_session: Any,
    arguments: list[str],
    expected: list[str],
) -> None:
    assert run_cli("generate", write_manifest(*GOOD), *arguments).code == 0
    assert fake_session.ran == expected


def test_shards_are_a_partition_in_one_folder(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    manifest = write_manifest(*GOOD)
    for shard in ("1/2", "2/2"):
        assert run_cli("generate", manifest, "--shard", shard).code == 0
    assert sorted(fake_session.ran) == ids(GOOD)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["jobs"]
    journals = sorted(path.name for path in (tmp_path / "runs/jobs").glob("*.jsonl"))
    assert journals == ["manifest.resolved.jsonl", "results-1-of-2.jsonl", "results-2-of-2.jsonl"]


BAD = (
    '{"prompt": ',
    {"prompt": ""},
    {"prompt": "x", "sed": 1},
    {"custom_id": "../x", "prompt": "y"},
)


def test_metadata_too_deep_for_a_result_line_is_a_fault_of_its_line(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, fake_session: Any, tmp_path: Path
) -> None:
    """It was found when the picture's line was written: that ended the run, at each try again."""

    def nested(levels: int) -> dict[str, Any]:
        value: Any = "inmost"
        for level in range(levels):
            value = [value] if level % 2 else {"in": value}
        return {"prompt": "a circle", "metadata": value, "x_a": value}

    deepest = nested(100)
    ran = run_cli("generate", write_manifest(deepest, nested(101), nested(900)), "--skip-invalid")
    assert (ran.code, len(fake_session.ran)) == (1, 1)
    lines = read_lines(tmp_path / "runs/jobs/results.jsonl")
    codes = [line["error"] and line["error"]["code"] for line in lines]
    assert codes == ["manifest.out-of-range", "manifest.bad-json", None]
    assert lines[-1]["metadata"] == deepest["metadata"]
    assert "metadata: it is nested too deeply" in ran.err
    assert "x_a: it is nested too deeply" in ran.err


def test_skip_invalid_runs_the_good_and_records_the_bad(
    run_cli: Run, write_manifest: Write, read_lines: ReadLines, fake_session: Any, tmp_path: Path
) -> None:
    manifest = write_manifest(*GOOD, *BAD)
    ran = run_cli("generate", manifest, "--skip-invalid", "--json")
    assert (ran.code, fake_session.ran) == (1, ids(GOOD))
    assert (summary_of(ran)["done"], summary_of(ran)["invalid"]) == (4, 4)
    lines = read_lines(tmp_path / "runs/jobs/results.jsonl")
    failed = [entry for entry in lines if entry["status"] == "failed"]
    assert ids(failed) == ["jobs-0005", "jobs-0006", "jobs-0007", "jobs-line-8"]
    assert all(entry["error"]["code"].startswith("manifest.") for entry in failed)
    again = run_cli("generate", manifest, "--skip-invalid")
    assert again.code == 1
    assert read_lines(tmp_path / "runs/jobs/results.jsonl") == lines


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_stops_between_steps_and_the_run_resumes(
    run_cli: Run, write_manifest: Write, fake_session: Any, name: str, code: int
) -> None:
    former = signal.getsignal(signal.Signals[name])
    stops = {"custom_id": "stop", "prompt": name}
    manifest = write_manifest(GOOD[0], stops, *GOOD[1:])
    ran = run_cli("generate", manifest, "--json")
    assert ran.code == code
    assert (summary_of(ran)["done"], summary_of(ran)["left"]) == (1, 4)
    assert "to resume: hyimg generate" in ran.err
    assert signal.getsignal(signal.Signals[name]) is former
    ran = run_cli("generate", manifest, "--select", "job-*", "--json")
    assert (ran.code, summary_of(ran)["skipped"], summary_of(ran)["done"]) == (0, 1, 3)


def test_the_second_signal_ends_at_once(
    run_cli: Run, write_manifest: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)

    monkeypatch.setattr(os, "_exit", leave)
    run_cli("generate", write_manifest({"prompt": "SIGTERM then SIGINT"}))
    assert codes == [143]


def sed(out: Path, pattern: bytes) -> None:
    """`sed -i '/pattern/d'`."""
    lines = (out / "results.jsonl").read_bytes().splitlines(keepends=True)
    (out / "sed").write_bytes(b"".join(line for line in lines if pattern not in line))
    (out / "sed").replace(out / "results.jsonl")


def clear_away(folder: Path) -> None:
    """`rm -r` until it is gone: the run's page may be written between its list and its end."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


# What somebody does in a run's folder, and how many of its four jobs the next run has to draw.
MEANWHILE: dict[str, tuple[Callable[[Path], object], int]] = {
    "unlinked": (lambda out: (out / "results.jsonl").unlink(), 4),
    "renamed": (lambda out: (out / "results.jsonl").rename(out / "saved.jsonl"), 4),
    "edited": (lambda out: sed(out, b"nothing"), 2),
    "a line less": (lambda out: sed(out, b"job-1"), 3),
    "truncated": (lambda out: os.truncate(out / "results.jsonl", 0), 4),
    "no outputs": (lambda out: clear_away(out / "outputs"), 4),
    "moved": (lambda out: out.rename(out.with_name("elsewhere")), 4),
    "removed": (clear_away, 4),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_a_run_whose_files_are_touched_stops_clearly_and_resumes(
    run_cli: Run,
    write_manifest: Write,
    read_lines: ReadLines,
    fake_session: Any,
    tmp_path: Path,
    what: str,
) -> None:
    manifest, out = write_manifest(*GOOD), tmp_path / "runs/jobs"
    touch, left = MEANWHILE[what]
    fake_session.meanwhile["job-2"] = touch
    stopped = run_cli("generate", manifest)
    assert stopped.code == 3
    assert stopped.err.count("error[storage.") == 1
    assert "hint: " in stopped.err
    assert "to resume: hyimg generate" in stopped.err
    assert fake_session.ran == ["job-0", "job-1", "job-2"]

    fake_session.meanwhile.clear()
    fake_session.ran.clear()
    resumed = run_cli("generate", manifest, "--json")
    assert (resumed.code, summary_of(resumed)["left"]) == (0, 0)
    assert fake_session.ran == ids(GOOD)[-left:], "nothing that has its line is drawn twice"
    assert set(ids(read_lines(out / "results.jsonl"))) == set(ids(GOOD))
    assert run_cli("generate", manifest, "--json").json_lines[-1]["summary"]["skipped"] == 4


def test_a_moved_folder_goes_on_where_it_is(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    manifest, moved = write_manifest(*GOOD), tmp_path / "moved"
    fake_session.meanwhile["job-2"] = lambda out: out.rename(moved)
    stopped = run_cli("generate", manifest)
    assert (stopped.code, "the folder does not exist" in stopped.err) == (3, True)
    assert not (tmp_path / "runs/jobs").exists()
    fake_session.ran.clear()
    assert run_cli("generate", manifest, "-o", moved).code == 0
    assert fake_session.ran == ["job-2", "job-3"]


def test_a_lock_that_is_removed_stops_nothing(
    run_cli: Run, write_manifest: Write, fake_session: Any
) -> None:
    fake_session.meanwhile["job-1"] = lambda out: (out / ".lock").unlink()
    ran = run_cli("generate", write_manifest(*GOOD), "--json")
    assert (ran.code, summary_of(ran)["done"]) == (0, 4)


def test_dry_run_is_the_plan_and_writes_nothing(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    manifest = write_manifest(*GOOD)
    dry = run_cli("generate", manifest, "--dry-run", "--json")
    assert (dry.code, fake_session.ran) == (0, [])
    assert not (tmp_path / "runs").exists()
    assert dry.json_lines == run_cli("plan", manifest, "--json").json_lines


def test_bars_go_to_stderr_alone(run_cli: Run, write_manifest: Write) -> None:
    ran = run_cli("generate", write_manifest(*GOOD, {"prompt": "fail"}), "--progress", "rich")
    assert (ran.code, ran.out) == (1, "")
    assert "4 done, 1 failed" in ran.err


def index_of(out: Path) -> dict[str, Any]:
    """What the run's page says of the whole run."""
    text = (out / "report/index.js").read_text()
    found: dict[str, Any] = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    return found


def counts_on_page(out: Path) -> tuple[int, int, int]:
    """Done, failed, left."""
    assert (out / "report.html").is_file()
    found = index_of(out)
    return found["done"], found["failed"], found["left"]


def test_a_run_ends_with_its_page(run_cli: Run, write_manifest: Write, tmp_path: Path) -> None:
    manifest, out = write_manifest(*GOOD), tmp_path / "runs/jobs"
    ran = run_cli("generate", manifest, "--limit", "2")
    assert ran.code == 0
    assert ran.err.endswith("report: runs/jobs/report.html\n")
    assert counts_on_page(out) == (2, 0, 2)
    assert run_cli("generate", manifest, "-q").err == ""
    assert counts_on_page(out) == (4, 0, 0)
    assert "report: " not in run_cli("generate", manifest).err


def test_a_run_has_its_page_while_it_goes(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    """A run killed here would leave what is seen here."""
    seen: list[tuple[int, int, int]] = []

    def look(out: Path) -> None:
        end = time.monotonic() + 120
        # The page itself is written last.
        while not (out / "report.html").is_file() or counts_on_page(out) == (0, 0, 4):
            assert time.monotonic() < end, "the first picture is not on the page"
            time.sleep(0.01)
        assert index_of(out)["running"]
        seen.append(counts_on_page(out))

    fake_session.meanwhile["job-2"] = look
    assert run_cli("generate", write_manifest(*GOOD)).code == 0
    ((done, failed, left),) = seen
    assert done >= 1
    assert (failed, left) == (0, 4 - done)
    assert not index_of(tmp_path / "runs/jobs")["running"]


@pytest.mark.parametrize("fault", [Interrupted(signal.SIGINT), RuntimeError("ours"), MemoryError()])
def test_a_run_that_ends_early_has_its_page(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path, fault: Exception
) -> None:
    fake_session.meanwhile["job-2"] = raising(fault)
    assert run_cli("generate", write_manifest(*GOOD)).code in (101, 130)
    done, failed, left = counts_on_page(tmp_path / "runs/jobs")
    assert done >= 2
    assert (failed, left) == (0, 4 - done)
    assert not index_of(tmp_path / "runs/jobs")["running"]


def test_ctrl_c_while_the_page_is_made_exits_130(
    run_cli: Run, write_manifest: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(page: LivePage) -> None:
        page._thread.shutdown()  # the next run has a thread of its own
        os.kill(os.getpid(), signal.SIGINT)

    manifest = write_manifest(*GOOD)
    with monkeypatch.context() as patch:
        patch.setattr(LivePage, "close", press)
        assert run_cli("generate", manifest).code == 130
    ran = run_cli("generate", manifest)
    assert (ran.code, "4 skipped" in ran.err) == (0, True)
    assert counts_on_page(tmp_path / "runs/jobs") == (4, 0, 0)


def test_the_page_can_be_left_out(run_cli: Run, write_manifest: Write, tmp_path: Path) -> None:
    assert run_cli("generate", write_manifest(*GOOD), "--no-report").code == 0
    assert not list((tmp_path / "runs/jobs").glob("report*"))


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def put(path: Path, make: Callable[[Path], object]) -> None:
    """Makes something else of a part of the page, which may be written meanwhile."""
    while True:
        with contextlib.suppress(OSError):
            remove(path)
            make(path)
            return


def scribble(name: str) -> Callable[[Path], object]:
    return lambda out: (out / name).write_bytes(b"\xff not what was written")


PAGE = "hyimg_cli.report.run_page"
# What goes wrong with the page: an attribute that is replaced, or a deed in the folder.
FAULTS: dict[str, tuple[str, Any]] = {
    "a template's fault": (f"{PAGE}.render", raising(jinja2.UndefinedError("'x' is undefined"))),
    "a fault of ours": (f"{PAGE}.record", raising(KeyError("path\nand more"))),
    "no memory": (f"{PAGE}.outcomes_in", raising(MemoryError())),
    "a full disk": (f"{PAGE}.replace_file", raising(OSError(errno.ENOSPC, "no space"))),
    "no right to": (f"{PAGE}.replace_file", raising(PermissionError(errno.EACCES, "no"))),
    "no results": (f"{PAGE}.opened", raising(OSError(errno.EIO, "bad sector"))),
    "another's page": ("", scribble("report.html")),
    "a folder": ("", lambda out: put(out / "report.html", Path.mkdir)),
    "a file": ("", lambda out: put(out / "report", Path.touch)),
    "damaged jobs": ("", scribble("manifest.resolved.jsonl")),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("code", [0, 1])
def test_a_page_that_cannot_be_made_is_told_and_changes_no_exit_code(
    run_cli: Run,
    write_manifest: Write,
    fake_session: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    code: int,
) -> None:
    manifest, out = write_manifest(*GOOD, *[{"prompt": "fail"}] * code), tmp_path / "runs/jobs"
    name, deed = FAULTS[fault]
    if name:
        monkeypatch.setattr(name, deed)
    else:
        fake_session.meanwhile["close"] = deed
    ran = run_cli("generate", manifest)
    assert ran.code == code
    assert f"4 done, {code} failed" in ran.err
    if fault == "another's page":
        assert "report: runs/jobs/report.html" in ran.err
    else:
        (told,) = (line for line in ran.err.splitlines() if line.startswith("no report: "))
        assert ran.err.endswith(f"{told}\n")
        again = told.split("; to write it: hyimg ")[1]
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        if fault in ("a folder", "a file"):
            remove(out / {"a folder": "report.html", "a file": "report"}[fault])
        if fault == "damaged jobs":
            run_cli("generate", manifest)
        assert run_cli(*again.split()).code == 0
    assert len(fake_session.ran) == 4 + code
    assert counts_on_page(out) == (4, code, 0)


def test_a_journal_that_goes_after_the_last_line_is_told(
    run_cli: Run, write_manifest: Write, fake_session: Any
) -> None:
    fake_session.meanwhile["close"] = lambda out: (out / "results.jsonl").unlink()
    ran = run_cli("generate", write_manifest(*GOOD))
    assert ran.code == 3
    assert "error[storage.journal]: results.jsonl was removed" in ran.err


def test_a_picture_that_is_gone_by_then_fails_no_sheet(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    fake_session.meanwhile["close"] = lambda out: (out / "outputs/job-1.png").unlink()
    ran = run_cli("generate", write_manifest(*GOOD))
    assert (ran.code, "no report" in ran.err) == (0, False)
    assert "file not found" in (tmp_path / "runs/jobs/report/data-0001.js").read_text()


def test_a_session_that_does_not_close_fails_no_run(
    run_cli: Run, write_manifest: Write, fake_session: Any
) -> None:
    fake_session.meanwhile["close"] = raising(RuntimeError("a rank is stuck"))
    ran = run_cli("generate", write_manifest(*GOOD))
    assert ran.code == 0
    assert "the session did not close properly: RuntimeError: a rank is stuck\n" in ran.err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_summary_that_nobody_takes_fails_no_run(
    run_cli: Run, write_manifest: Write, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if "summary" in text:
                raise OSError(number, os.strerror(number))
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Full())
    ran = run_cli("generate", write_manifest(*GOOD), "--json")
    assert ran.code == 0
    (told,) = (line for line in ran.err.splitlines() if line.startswith("no summary: "))
    assert os.strerror(number) in told
    assert told.endswith("; see runs/jobs/results.jsonl")
