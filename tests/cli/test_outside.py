"""Edits with `--keep-outside`, from a manifest to files, and finished again."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hyimg_cli.cli import app
from hyimg_cli.cli.progress import stoppable
from hyimg_cli.engine import recomposite
from hyimg_cli.engine import run as manifest_run
from hyimg_cli.engine.runner import RunRequest, Summary
from hyimg_cli.engine.session import Session
from hyimg_cli.errors import Interrupted
from hyimg_cli.journal.job_pictures import finish
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.measure.replay.verdict import answer_to, verdict
from hyimg_cli.media.images import pixel_digest, text_of
from hyimg_cli.media.recorded import read_described
from hyimg_cli.settings.config import settings_of
from hyimg_cli.settings.run import OutputConfig, RunConfig
from hyimg_cli.spec.digest import of_file
from hyimg_cli.spec.events import Outcome

Run = Callable[..., Any]
SOURCE = Path(__file__).parents[2] / "recipes" / "quickstart" / "red-circle.png"
JOB = {"custom_id": "blue", "prompt": "make the circle blue", "images": ["in/red.png"], "seed": 3}
JOB |= {"keep_outside": True, "num_inference_steps": 8, "bot_task": "none"}
PLAIN = {"custom_id": "plain", "prompt": "a red circle", "bot_task": "none", "seed": 1}
FLAGS = ("--device", "cpu", "--no-prewarm")


def write(home: Path, *lines: dict[str, Any]) -> Path:
    path = home / "jobs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a manifest, its source and a run of it; only copies of it are changed."""
    home = tmp_path_factory.mktemp("made")
    (home / "in").mkdir()
    shutil.copy(SOURCE, home / "in" / "red.png")
    command = ["generate", str(write(home, JOB)), "-o", str(home / "run"), *FLAGS, "-q"]
    assert app.run([*command, "--cache-dir", str(home / "c")]) == 0
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which no model can be asked for."""

    def none(config: Any) -> Session:
        raise AssertionError("no model is needed")

    monkeypatch.setattr(manifest_run, "session_for", none)
    return Path(shutil.copytree(made, tmp_path / "copy"))


def line_of(home: Path) -> dict[str, Any]:
    return json.loads((home / "run" / "results.jsonl").read_text().splitlines()[-1])


def test_the_result_is_the_source_but_for_the_edit(made: Path) -> None:
    line = line_of(made)
    edit, folder = line["edit"], made / "run"
    assert line["finishing_key"]
    assert edit["outside_equal"] or edit["kind"] == "global"
    own = np.array(Image.open(SOURCE).convert("RGB"))
    found = np.array(Image.open(folder / line["outputs"][0]["path"]).convert("RGB"))
    assert edit["kind"] == "local", edit
    assert found.shape == own.shape
    free = np.array(Image.open(folder / edit["mask"])) == 0
    assert np.array_equal(found[free], own[free])
    assert free.mean() > 0.3
    assert np.array(Image.open(folder / edit["plain"])).shape == (64, 64, 3)
    records = (folder / "report" / "data-0001.js").read_text()
    assert '"mask":{' in records.replace('": {', '":{')


def test_another_finishing_needs_no_model_and_no_force(
    home: Path, run_cli: Run, write_manifest: Any
) -> None:
    before = line_of(home)
    half = JOB | {"region": [0, 0, 64, 128], "max_edited_area": 0.01}
    command = ("generate", write(home, half), "-o", home / "run", *FLAGS)
    ran = run_cli(*command)
    assert ran.code == 1, "a gate says no"
    assert "1 edit finished again from the saved redraws" in ran.err
    assert "gate: max_edited_area 0.01" in ran.err
    after = line_of(home)
    assert after["key"] == before["key"]
    assert after["finishing_key"] != before["finishing_key"]
    assert after["edit"]["plain"] == before["edit"]["plain"]
    assert "region: 50% of the picture" in after["notes"]
    assert not any("region" in note for note in before["notes"])
    own = np.array(Image.open(SOURCE).convert("RGB"))
    found = np.array(Image.open(home / "run" / after["outputs"][0]["path"]).convert("RGB"))
    assert np.array_equal(found[:, 64:], own[:, 64:])
    assert not np.array_equal(found[:, :64], own[:, :64])
    again = run_cli(*command)
    assert again.code == 1, "what is done is still beyond its gate"
    assert "1 skipped" in again.err
    assert "finished again" not in again.err
    # Back as it was: the same bytes.
    write(home, JOB)
    assert run_cli(*command).code == 0
    assert line_of(home)["outputs"] == before["outputs"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_edit_that_is_being_finished_and_fails_none(
    home: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    finished = []

    def stopped(*given: Any) -> Any:
        finished.append(given)
        os.kill(os.getpid(), number)
        return finish(*given)

    monkeypatch.setattr(recomposite, "finish", stopped)
    command = ("generate", home / "jobs.jsonl", "-o", home / "run", *FLAGS)
    ran = run_cli(*command, "--max-spill", 1, "--region", "0,0,64,128")
    assert (ran.code, len(finished)) == (128 + number, 1)
    assert line_of(home)["status"] == "done"
    ran = run_cli(*command, "--max-spill", 1, "--region", "0,0,64,128")
    assert "0 done, 0 failed, 1 skipped" in ran.err


def test_behind_a_signal_no_other_edit_is_begun() -> None:
    begun = []

    def outcomes() -> Iterator[Outcome]:
        for name in ("a", "b", "c"):
            begun.append(name)
            if name == "b":
                os.kill(os.getpid(), signal.SIGTERM)
            yield Outcome(name, "done", key="k")

    config = RunConfig(OutputConfig(Path("out")))
    nothing = manifest_of(b"", "nothing")
    run = manifest_run.ManifestRun(RunRequest(nothing, config, settings_of(config)))
    shown: list[str] = []
    run._update_page = lambda event: shown.append(event.outcome.custom_id)
    with pytest.raises(Interrupted), stoppable(run.request_stop):
        run._recomposite(outcomes())
    assert begun == shown == ["a", "b"]


def test_what_goes_along_is_finished_again_too(home: Path, run_cli: Run) -> None:
    before = line_of(home)["outputs"]
    result = home / "run" / before[0]["path"]
    command = ("generate", home / "jobs.jsonl", "-o", home / "run", *FLAGS)
    for flag, says_how in (("--no-metadata", False), ("--keep-gps", True)):
        assert "1 edit finished again" in run_cli(*command, flag).err
        assert bool(text_of(result).record) == says_how
    assert "1 edit finished again" in run_cli(*command).err
    assert line_of(home)["outputs"] == before


def test_a_lost_result_is_made_again_of_its_redraw(home: Path, run_cli: Run) -> None:
    result = home / "run" / line_of(home)["outputs"][0]["path"]
    data = result.read_bytes()
    result.unlink()
    assert run_cli("generate", home / "jobs.jsonl", "-o", home / "run", *FLAGS).code == 0
    assert result.read_bytes() == data
    matte = home / "run" / line_of(home)["edit"]["mask"]
    data = matte.read_bytes()
    matte.unlink()
    assert run_cli("generate", home / "jobs.jsonl", "-o", home / "run", *FLAGS).code == 0
    assert matte.read_bytes() == data


def test_a_source_that_is_gone_fails_and_loses_no_picture(home: Path, run_cli: Run) -> None:
    """The folder's keys are of the source's bytes: here only the finishing reads it."""
    half = JOB | {"region": "mask.png"}
    mask = np.zeros((128, 128), np.uint8)
    mask[:, :64] = 255
    Image.fromarray(mask).save(home / "mask.png")
    command = ("generate", write(home, half), "-o", home / "run", *FLAGS)
    assert run_cli(*command).code == 0
    assert line_of(home)["edit"]["spill"] > 0.2
    plan = run_cli("plan", home / "jobs.jsonl", "-o", home / "run")
    assert "1 already done" in plan.out + plan.err
    mask[:] = 255
    Image.fromarray(mask).save(home / "mask.png")
    plan = run_cli("plan", home / "jobs.jsonl", "-o", home / "run")
    assert "1 to finish again without a model" in plan.out + plan.err


@pytest.mark.parametrize("command", ["check", "plan", "generate"])
def test_a_source_that_was_deleted_since_is_told_as_not_found(
    home: Path, run_cli: Run, command: str
) -> None:
    (home / "in" / "red.png").unlink()
    ran = run_cli(command, home / "jobs.jsonl", "-o", home / "run", *FLAGS[:2])
    assert ran.code == 2
    assert (
        "1 of 1 job differs (source image not found: 1) from the results in this folder" in ran.err
    )
    assert "hint: restore the source images, or choose another folder with -o" in ran.err


BARE = {name: value for name, value in JOB.items() if name != "keep_outside"}


def test_a_region_implies_keep_outside(home: Path, run_cli: Run) -> None:
    """In a line, as a flag, and where the texts alone are written."""
    half = ("--region", "0,0,64,128")
    before = line_of(home)["key"]
    for line, flags in ((BARE | {"region": "0,0,64,128"}, ()), (BARE, half)):
        command = ("generate", write(home, line), "-o", home / "run", *FLAGS, *flags)
        assert run_cli(*command).code == 0
        assert line_of(home)["key"] == before
        assert line_of(home)["edit"]["spill"] > 0.2
    assert run_cli("think", write(home, line), "-o", home / "texts.jsonl").code == 0
    # What is nearer to the job says more, as with any setting.
    recipe = home / "r.toml"
    recipe.write_text('[outside]\nregion = "0,0,64,128"\n')
    for line, flags, keeps in (
        (BARE | {"keep_outside": False}, half, False),
        (BARE | {"region": "0,0,64,128"}, ("--no-keep-outside",), True),
        (BARE, ("--recipe", recipe), True),
        (BARE, ("--recipe", recipe, "--no-keep-outside"), False),
    ):
        plan = run_cli("plan", write(home, line), "-o", home / "run", *flags)
        assert ("1 of 1 job differs" not in plan.err) == keeps


def test_eval_does_the_same_for_any_two_pictures(home: Path, run_cli: Run) -> None:
    line = line_of(home)
    result = home / "run" / line["outputs"][0]["path"]
    ran = run_cli("eval", "outside", SOURCE, result, "--json")
    found = json.loads(ran.out)
    assert ran.code == 0
    assert found["kind"] == "local"
    assert found["outside_equal"]
    plain = run_cli(
        "eval", "outside", SOURCE, home / "run" / line["edit"]["plain"], "--max-edited-area", 0.01
    )
    assert plain.code == 1
    assert "gate: max_edited_area 0.01" in plain.err
    assert run_cli("eval", "outside", SOURCE).code == 2


def outside_of(run_cli: Run, *given: Any) -> dict[str, Any]:
    return json.loads(run_cli("eval", "outside", *given, "--json").out)


def test_eval_of_a_result_goes_by_the_matte_that_its_run_recorded(home: Path, run_cli: Run) -> None:
    line, run = line_of(home), home / "run"
    result, matte = run / line["outputs"][0]["path"], run / line["edit"]["mask"]
    by_region = (result, "--region", matte, "--region-mode", "instead")
    for given in ((result,), by_region, (result, "--region", matte)):
        found = outside_of(run_cli, SOURCE, *given, "--max-outside-change", 0)
        assert (found["outside_equal"], found["outside_differing_pixels"]) == (True, 0)
        assert (found["change"], found["gates"]) == ({"mean_de": 0.0}, [])
    assert found["outside_pixels"] == (np.array(Image.open(matte)) == 0).sum()
    found = outside_of(run_cli, SOURCE, result)
    assert (found["outside_by"], found["area"]) == ("matte", line["edit"]["area"])
    # A pixel that is changed afterwards, right beside the edit, is found.
    levels, pixels = np.array(Image.open(matte)), np.array(Image.open(result))
    y, x = np.argwhere((levels == 0) & np.roll(levels > 0, 1, axis=1))[0]
    pixels[y, x] ^= 1
    Image.fromarray(pixels).save(result)
    ran = run_cli("eval", "outside", SOURCE, result, "--max-outside-change", 0)
    assert (ran.code, "pixels that differ outside: 1 of" in ran.out) == (1, True)
    assert "counted as outside: where the run's matte is 0" in ran.out
    # What decides is the matte, as its run wrote it.
    levels[y, x] = 1
    Image.fromarray(levels).save(matte)
    ran = run_cli("eval", "outside", SOURCE, result)
    assert (ran.code, "the matte is not the one that its run wrote" in ran.err) == (2, True)
    line["edit"]["sha256"]["mask"] = of_file(matte)
    (run / "results.jsonl").write_text(json.dumps(line) + "\n")
    assert outside_of(run_cli, SOURCE, result)["outside_equal"]


def test_eval_of_a_picture_that_is_another_one_lets_no_gate_pass(
    home: Path, run_cli: Run, tmp_path: Path
) -> None:
    """Whoever made it: nothing of it is outside, so all of it counts."""
    (negative,) = pictures(tmp_path, 255 - np.array(Image.open(SOURCE).convert("RGB")))
    run, line = home / "run", line_of(home)
    result = run / line["outputs"][0]["path"]
    shutil.copy(negative, result)
    line["edit"]["kind"] = "global"
    line["edit"]["area"] = 1.0
    (run / "results.jsonl").write_text(json.dumps(line) + "\n")
    for file, by in ((negative, "found"), (result, "matte")):
        ran = run_cli("eval", "outside", SOURCE, file, "--max-edited-area", 0.9, "--json")
        (found,) = ran.json_lines
        assert (ran.code, found["kind"], found["area"], found["outside_by"]) == (1, "global", 1, by)
        assert found["outside_equal"] is None
        assert found["change"]["mean_de"] > 50
        ran = run_cli("eval", "outside", SOURCE, file, "--max-outside-change", 3)
        assert (ran.code, "nothing: the whole picture was edited" in ran.out) == (1, True)


def test_eval_of_a_region_counts_all_that_it_leaves_out(tmp_path: Path, run_cli: Run) -> None:
    """A soft mask leaves out its black pixels alone."""
    own, region = np.full((60, 80), 120, np.uint8), np.zeros((60, 80), np.uint8)
    other = own.copy()
    other[10:40, 10:40] = 220
    region[10:40, 10:30], region[10:40, 20:30] = 255, 127
    files = pictures(tmp_path, own, other, region)
    for mode in ("instead", "limit"):
        given = (*files[:2], "--region", files[2], "--region-mode", mode)
        found = outside_of(run_cli, *given)
        assert found["outside_differing_pixels"] == 300
        assert found["spill"] > 0.3
        assert (found["region_area"], found["region_blends"]) == (0.0625, 0.0625)
    assert outside_of(run_cli, *files[:2])["outside_differing_pixels"] == 0


PEAK = """
import sys
from pathlib import Path
from hyimg_cli.measure import outside
from hyimg_cli.spec.options import KeepOutside
outside._AREA = 60_000
for pair in (sys.argv[1:3], sys.argv[3:5]):
    found = outside.outside_of(*map(Path, pair), KeepOutside())
    peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    print(found["outside_differing_pixels"], peak)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from there")
def test_eval_of_large_pictures_is_done_in_strips(tmp_path: Path) -> None:
    """Beside the two pictures, of 4 bytes a pixel each as Pillow holds them, hardly anything."""
    large = np.full((4000, 5000, 3), 90, np.uint8)
    edited = large.copy()
    edited[1000:1500, 2000:2500] = (200, 10, 10)
    edited[3999, 4999] ^= 1
    files = pictures(tmp_path, large[::16, ::16], edited[::16, ::16], large, edited)
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, files)], check=True, capture_output=True, text=True
    )
    (_, before), (differing, after) = (line.split() for line in ran.stdout.splitlines())
    assert differing == "1"
    assert (int(after) - int(before)) * 1024 < 18 * 4000 * 5000


def pictures(folder: Path, *levels: np.ndarray) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(len(levels))]
    for path, one in zip(paths, levels, strict=True):
        Image.fromarray(one).save(path)
    return paths


def test_eval_counts_alpha_too(tmp_path: Path, run_cli: Run) -> None:
    """And colours under clear pixels: on white they all look alike."""
    own = np.full((40, 60, 4), 200, np.uint8)
    own[:20, :, 3] = 0
    other = own.copy()
    other[3, 4, 0] = 9
    found = json.loads(run_cli("eval", "outside", *pictures(tmp_path, own, other), "--json").out)
    assert (found["outside_equal"], found["outside_differing_pixels"]) == (False, 1)


def test_eval_claims_nothing_of_16_bits_and_takes_the_smallest(
    tmp_path: Path, run_cli: Run
) -> None:
    deep, dot = np.full((40, 60), 30000, np.uint16), np.zeros((1, 1, 3), np.uint8)
    found = json.loads(run_cli("eval", "outside", *pictures(tmp_path, deep, deep), "--json").out)
    assert found["outside_equal"] is None
    ran = run_cli("eval", "outside", *pictures(tmp_path, dot, dot))
    assert "pixels that differ outside: 0 of 1" in ran.out


def test_what_goes_with_keep_outside_is_told_where_it_is_left_out(home: Path, run_cli: Run) -> None:
    left_out = run_cli("check", write(home, JOB | {"keep_outside": False}), "--max-spill", 0.1)
    assert (
        "note: --max-spill applies to edits with keep_outside only; no job is one" in left_out.err
    )
    flags = ("--region", "0,0,9,9", "--on-global", "fail", "--max-spill", 0.1)
    assert "appl" not in run_cli("check", write(home, JOB), *flags).err
    wide = run_cli("check", write(home, JOB), "--max-spill", 0.1, "--region-mode", "instead").err
    names = "--region-mode, --max-spill"
    assert f"note: {names} apply to edits with a region only; no job is one" in wide


def test_a_replay_answers_to_the_redraw_with_its_own(made: Path, run_cli: Run) -> None:
    line, run = line_of(made), made / "run"
    redraw, result = run / line["edit"]["plain"], run / line["outputs"][0]["path"]
    assert redraw.name == "blue.redraw.png"
    for file in (redraw, result):
        answer, digest = answer_to(file, run, line)
        assert answer == file
        assert verdict(read_described(file), file, answer, digest).equal
    _, other = answer_to(result, run, line)
    assert not verdict(read_described(redraw), redraw, result, other).equal
    itself = run_cli("replay", redraw, "-o", run, "--device", "cpu")
    assert (itself.code, "replace the file itself" in itself.err) == (2, True)


def test_a_replay_beyond_its_gate_is_compared_all_the_same(tmp_path: Path, run_cli: Run) -> None:
    shutil.copytree(SOURCE.parent, tmp_path / "in")
    job = JOB | {"images": ["in/red-circle.png"], "max_edited_area": 0.0001}
    assert run_cli("generate", write(tmp_path, job), "-o", tmp_path / "run", *FLAGS).code == 1
    file = tmp_path / "run" / "outputs" / "blue.png"
    ran = run_cli("replay", file, "-o", tmp_path / "again", "--device", "cpu", "--expect-equal")
    assert (ran.code, "equal: the pixels of" in ran.err) == (0, True)
    assert "gate: max_edited_area" in ran.err


def test_an_edit_that_failed_is_beyond_no_gate() -> None:
    """The next command counts those that are done."""
    counts = Summary()
    for status in ("failed", "done"):
        counts.finish(Outcome("a", status, key="k", edit={"kind": "global", "gates": ["beyond"]}))
    assert (counts.failed, counts.done, counts.gated) == (1, 1, 1)


@pytest.mark.parametrize("channels", [2, 4])
def test_a_replay_of_alpha_or_grey_is_equal_to_it(
    made: Path, channels: int, tmp_path: Path
) -> None:
    """A result has its source's channels, and its digest is of them."""
    described = read_described(made / "run" / line_of(made)["outputs"][0]["path"])
    pixels = np.random.default_rng(0).integers(
        0, 255, (9, 9, channels)[: channels // 2 + 1], np.uint8
    )
    (file,) = pictures(tmp_path, pixels)
    shutil.copy(described.path, tmp_path / "made.png")
    assert verdict(described, file, tmp_path / "made.png", pixel_digest(pixels)).equal
    pixels[0, 0] ^= 1
    assert not verdict(described, file, tmp_path / "made.png", pixel_digest(pixels)).equal


@pytest.mark.parametrize("end", ["mask", "redraw", "reference"])
def test_two_jobs_of_which_one_is_called_like_a_file_beside_the_other(
    home: Path, run_cli: Run, end: str
) -> None:
    other = PLAIN | {"custom_id": f"blue.{end}"}
    ran = run_cli("check", write(home, JOB, other))
    assert ran.code == 2
    assert f"blue.{end}.png" in ran.err


def test_a_source_that_was_not_kept_is_counted_at_the_end_later_and_by_status(
    home: Path, run_cli: Run
) -> None:
    out, results = home / "run", home / "run" / "results.jsonl"
    command = ("generate", home / "jobs.jsonl", "-o", out, *FLAGS)
    said = {"local": "", "background": "", "none": "1 without an edit"}
    for kind, words in (said | {"global": "source not kept: 1 of 1"}).items():
        line = line_of(home)
        line["edit"]["kind"] = kind
        results.write_text(json.dumps(line | {"warnings": ["look at it"] * bool(words)}) + "\n")
        counts = ", ".join(filter(None, ["0 done, 0 failed, 1 skipped", words]))
        assert f"{counts}; results in" in run_cli(*command).err
        status = run_cli("status", out)
        told = ", ".join(
            ["1 done, 0 failed, 0 left", *([words, "1 with warnings"] if words else [])]
        )
        assert (status.code, status.out) == (0, f"{out}: {told}\n")
        page = (out / "report" / "index.js").read_text()
        assert (f'"edits":["{words}"]' in page) == bool(words)
    merged = run_cli("merge", out, "-o", home / "all").err
    assert "1 done, 0 failed, 0 missing, source not kept: 1 of 1\n" in merged
    (found,) = run_cli("status", out, "--json").json_lines
    assert (found["edits"], found["whole"], found["warned"], found["left"]) == (1, 1, 1, 0)


def test_status_names_what_failed_and_refuses_another_folder(home: Path, run_cli: Run) -> None:
    line = line_of(home) | {"status": "failed", "error": {"code": "outside.global"}}
    (home / "run" / "results.jsonl").write_text(json.dumps(line) + "\n")
    ran = run_cli("status", home / "run")
    assert ran.code == 1
    assert "0 done, 1 failed, 0 left\n  1 failed: outside.global\n" in ran.out
    ran = run_cli("status", home / "in")
    assert (ran.code, "error[usage.no-run]" in ran.err) == (2, True)
