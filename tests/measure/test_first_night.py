"""The first night of a model: steps, kills, figures, and what is not in them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hyimg_cli.measure.first_night import commands, night
from hyimg_cli.measure.first_night.commands import Ended, Kill, call, finished, killed
from hyimg_cli.measure.first_night.figures import resumed, run_figures
from hyimg_cli.measure.first_night.night import PAGE, RECORD, Night

SECRET = "grandmother"
LINE: dict[str, Any] = {
    "custom_id": SECRET,
    "status": "done",
    "outputs": [{"path": f"outputs/{SECRET}.png", "sha256": "00", "width": 4, "height": 4}],
    "timings_s": {"denoise_first": 1.0, "decode_latents": 0.5},
    "share_s": {"total": 2.0},
    "peak_memory_mb": 700.0,
    "denoise_steps": 4,
    "warnings": [f"{SECRET} was cut"],
    "edit": {
        "kind": "local",
        "area": 0.1,
        "doubts": ["look at it"],
        "outside_differing_pixels": 0,
        "crop": {"box": [0, 0, 2, 2]},
    },
}
FAILED = {"custom_id": "b", "status": "failed", "error": {"code": "job.memory", "message": SECRET}}
# A run that appends a line each tenth of a second.
SLOW = """
import json, sys, time
from pathlib import Path
for n in range(20):
    with Path(sys.argv[1]).open("a") as lines:
        lines.write(json.dumps({"custom_id": str(n), "status": "done", "outputs": []}) + "\\n")
    time.sleep(0.1)
"""


def write_run(folder: Path, *lines: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    info = {"versions": {"hyimg": "1"}, "hardware": {"gpus": []}, "flags": {"prompt": SECRET}}
    (folder / "run.json").write_text(json.dumps(info))


def test_figures_of_a_run_say_nothing_of_its_pictures(tmp_path: Path) -> None:
    write_run(tmp_path, LINE, LINE | {"custom_id": "c", "share_s": {"total": 4.0}}, FAILED)
    found = run_figures(tmp_path)
    assert (found["done"], found["failed"]) == (2, {"job.memory": 1})
    assert found["seconds_a_picture"] == {"min": 2.0, "median": 3.0, "max": 4.0}
    assert found["seconds_by_phase"] == {"denoise_first": 1.0, "decode_latents": 0.5}
    assert (found["peak_memory_mb"], found["steps"], found["kinds"]) == (700.0, [4], {"local": 2})
    counts = (found[name] for name in ("with_doubts", "with_warnings", "crops"))
    assert [*counts, found["outside_differing_pixels"]] == [2, 2, 2, 0]
    assert SECRET not in json.dumps(found)


def test_a_run_is_killed_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, log = tmp_path / "results.jsonl", tmp_path / "log"
    monkeypatch.setattr(commands, "_command", lambda words: [sys.executable, "-c", SLOW, *words])
    kill = killed(str(lines), folder=tmp_path, after=2, log=log)
    assert 2 <= len(kill.done) == len(finished(tmp_path)) < 20
    assert resumed(kill, tmp_path) == {
        "killed_after": len(kill.done),
        "kept": len(kill.done),
        "drawn_again": 0,
    }
    other = Kill(1.0, {"0": ["another file"]})
    assert resumed(other, tmp_path)["drawn_again"] == 1
    # One that ends before is not killed.
    monkeypatch.setattr(commands, "_command", lambda words: [sys.executable, "-c", "", *words])
    assert killed(folder=tmp_path, after=99, log=log).done == {}


def test_what_a_command_says_goes_to_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; print('text'); print('{\"a\": 1}'); sys.exit(sys.stderr.write('why'))"
    monkeypatch.setattr(commands, "_command", lambda words: [sys.executable, "-c", code])
    ended = call(log=tmp_path / "log")
    assert (ended.code, ended.lines) == (3, [{"a": 1}])
    assert (tmp_path / "log").read_text() == 'whytext\n{"a": 1}\n'


def test_the_record_has_no_path_name_or_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture, folder = tmp_path / f"{SECRET}.png", tmp_path / f"{SECRET}-night"
    Image.new("RGB", (40, 30)).save(picture)
    model = tmp_path / f"{SECRET}-model"
    model.mkdir()
    answers = {
        "doctor": {"ready": True, "checks": [{"name": "gpus", "status": "ok", "found": SECRET}]},
        "plan": {
            "time": None,
            "memory": {str(model): {"total": 5}},
            "auto_fit": {str(model): "group"},
            "groups": [{"jobs": 1, "model": str(model), "prompt": SECRET, "cards": {}}],
        },
    }
    said = list[tuple[str, ...]]()

    def answer(*words: str, **_: Any) -> Ended:
        said.append(words)
        if words[0] == "generate":
            write_run(Path(words[words.index("-o") + 1]), LINE)
        return Ended(0, 1.0, [answers[words[0]]] if words[0] in answers else [])

    monkeypatch.setattr(night, "call", answer)
    monkeypatch.setattr(night, "killed", lambda *_, **__: Kill(1.0, {SECRET: ["00"]}))
    one = Night(str(model), ["--model", str(model), "--seed", "1"], [picture], SECRET, folder)
    steps = [*one.steps()]
    assert [text.split(":")[0] for text in steps] == [
        "doctor", "pull", "plan", "fit", "native", "diffusers",
    ]  # fmt: skip
    assert one.is_whole
    record, page = ((folder / name).read_text() for name in (RECORD, PAGE))
    assert SECRET not in record + page
    assert str(tmp_path) not in record + page
    found = json.loads(record)
    assert (found["model"], found["plan"]["auto_fit"]) == ("another checkpoint", ["group"])
    assert found["fit"]["resume"] == {"killed_after": 1, "kept": 1, "drawn_again": 0}
    assert found["diffusers"] == {"compared": False}
    # Both runs are the user's command, with the flags that were given.
    runs = [words for words in said if words[0] == "generate"]
    assert [words[words.index("--region-size") + 1] for words in runs] == ["fit", "native"]
    assert all(words[words.index("--seed") + 1] == "1" for words in runs)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["", "klein"])
def test_a_night_on_a_tiny_checkpoint(
    tmp_path: Path, run_cli: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whole: with processes, kills, and the library's own pipeline where it has one."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    # Each of its 15 processes would read the libraries' source again, for 10 s.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    from tiny_editors import write

    model = ["--model", str(write(tmp_path / "model", kind))] if kind else []
    (tmp_path / "photos").mkdir()
    for number in range(3):
        Image.linear_gradient("L").rotate(40 * number).convert("RGB").save(
            tmp_path / "photos" / f"{SECRET}-{number}.png"
        )
    given = (str(tmp_path / "photos"), *model, "--device", "cpu", "--steps", "2")
    ran = run_cli("first-night", *given, "-o", str(tmp_path / "night"))
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / "night" / RECORD).read_text())
    for run in ("fit", "native"):
        assert (found[run]["done"], found[run]["outside_differing_pixels"]) == (3, 0)
        assert found[run]["resume"]["drawn_again"] == 0
    assert found["diffusers"]["compared"] == bool(kind)
    assert SECRET not in json.dumps(found)
