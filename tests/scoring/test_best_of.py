"""Drafts, scores, picks and finals by the commands, with the embedded model."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.picks import read_picks
from hyimg_cli.media.images import pixel_digest
from hyimg_cli.scoring.process import ScorerProcess

SOURCE = Path(__file__).parents[2] / "recipes" / "quickstart" / "red-circle.png"
DRAW = {"num_inference_steps": 4, "max_new_tokens": 24}
LINES = (
    {"custom_id": "cat", "prompt": "a red circle", "bot_task": "recaption", "n": 3, **DRAW},
    {"custom_id": "edit", "prompt": "make the circle blue", "images": ["circle.png"], **DRAW},
)
FLAGS = ("--n", "3", "-q", "--no-report")
COMMAND = ("generate", "jobs.jsonl", *FLAGS, "-o", "out")
Run = Callable[..., Any]


@pytest.fixture
def here(tmp_path: Path, scorers_file: Path, write_manifest: Callable[..., Path]) -> Path:
    shutil.copy(SOURCE, tmp_path / "circle.png")
    write_manifest(*LINES)
    return tmp_path


def pixels(folder: Path) -> dict[str, str]:
    return {
        name: line["outputs"][0]["pixel_sha256"]
        for name, line in RunFolder(folder).results().items()
    }


def forbid_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: ScorerProcess) -> None:
        raise AssertionError(f"{self.scorer.name} was started")

    monkeypatch.setattr(ScorerProcess, "_start", start)


def test_finals_are_the_plain_runs_pictures_and_nothing_is_done_twice(
    here: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = ("--draft-steps", "2", "--score", "mine.py:random", "--pick", "2")
    # A step cache is refused under 12 steps: the drafts of these jobs have none.
    cached = json.loads((here / "jobs.jsonl").read_text().splitlines()[0])
    cached |= {"custom_id": "cached", "num_inference_steps": 12, "step_cache": "taylor:interval=4"}
    (here / "cached.jsonl").write_text(json.dumps(cached) + "\n")
    for manifest in ("jobs.jsonl", "cached.jsonl"):
        for out, more in (("plain", ()), ("out", drafts)):
            where = ("-o", f"{out}/{manifest}", *more)
            assert run_cli("generate", manifest, *FLAGS, *where).code == 0
        out, plain = (here / name / manifest for name in ("out", "plain"))
        finals = pixels(out)
        assert finals.items() <= pixels(plain).items()
        assert {line["draft_of"] for line in RunFolder(out / "drafts").results().values()} == {
            *pixels(plain)
        }
        for of, line in read_picks(out).items():
            # 0, 2, 4 fifths: the last two are picked, the best one first.
            assert line["picked"] == [f"{of}-2", f"{of}-1"]
            assert (line["missing"], line["draft_steps"]) == ([], 2)
            assert {*line["picked"]} <= finals.keys()
    scores = (here / "out/jobs.jsonl/scores.jsonl").read_bytes()
    picks = (here / "out/jobs.jsonl/picks.jsonl").read_bytes()
    forbid_processes(monkeypatch)
    plan = run_cli("plan", "jobs.jsonl", "-o", "out/jobs.jsonl", "--n", "3", *drafts)
    assert (plan.code, "the plan is of the drafts; then 2 of each line" in plan.err) == (0, True)
    again = ("generate", "jobs.jsonl", "-o", "out/jobs.jsonl", "--n", "3", "--no-report", *drafts)
    done = run_cli(*again)
    assert (done.code, "loaded" in done.err) == (0, False)
    assert run_cli("score", "out/jobs.jsonl", "--score", "mine.py:random").code == 0
    assert (here / "out/jobs.jsonl/scores.jsonl").read_bytes() == scores
    assert (here / "out/jobs.jsonl/picks.jsonl").read_bytes() == picks
    # A scorer that comes later is shown drafts and finals.
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert run_cli("score", "out/jobs.jsonl", "--score", "mine.py:odd").code == 0
    assert run_cli("pick", "out/jobs.jsonl").code == 0
    ranked = read_picks(here / "out/jobs.jsonl")["cat"]["ranking"]
    assert [one["final_values"].keys() for one in ranked[:2]] == [{"random", "odd"}] * 2
    forbid_processes(monkeypatch)
    # Another threshold scores nothing.
    gate = run_cli("pick", "out/jobs.jsonl", "--min", "random=0.5", "--json")
    assert [one["picked"] for one in gate.json_lines] == [["cat-2"], ["edit-2"]]
    assert gate.json_lines[0]["rejected"][1]["reasons"] == ["random 0.4 < 0.5"]


def test_more_candidates_draw_what_is_new(here: Path, run_cli: Run) -> None:
    command = ("generate", "jobs.jsonl", "-o", "out", "--no-report", "--score", "mine.py:random")
    assert run_cli(*command, "--limit", "3").code == 0
    assert pixels(here / "out").keys() == {"cat-0", "cat-1", "cat-2"}
    lines = [{**LINES[0], "n": 4}, {**LINES[1], "n": 2}]
    (here / "jobs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    more = run_cli(*command)
    assert "3 done, 0 failed, 3 skipped" in more.err
    # cat-2 has 4 fifths, edit-0 0, edit-1 2.
    poor = run_cli(*command, "--min", "random=0.5")
    assert (poor.code, "2 lines, 1 with an accepted candidate" in poor.err) == (1, True)


def test_a_persons_choice_is_kept_and_drawn_in_full(here: Path, run_cli: Run) -> None:
    command = (*COMMAND, "--draft-steps", "1", "--score", "mine.py:random")
    assert run_cli(*command).code == 0
    assert read_picks(here / "out")["cat"]["picked"] == ["cat-2"]
    said = run_cli("pick", "out", "--choose", "cat=cat-0", "--choose", "edit=none")
    assert said.code == 1
    assert "cat: cat-0 picked by a person; not drawn in full yet: cat-0" in said.err
    assert run_cli(*command).code == 1  # nothing of the edit is good
    picks = read_picks(here / "out")
    assert (picks["cat"]["picked"], picks["cat"]["missing"]) == (["cat-0"], [])
    assert "cat-0" in pixels(here / "out")
    (here / "choices.jsonl").write_text('{"candidate_of": "edit", "picked": null}\n')
    assert run_cli("pick", "out", "--choices", "choices.jsonl").code == 0
    assert read_picks(here / "out")["edit"]["chosen_by"] == "rule"
    # In the drafts' folder it would count for nothing.
    for command in ("pick", "score"):
        drafts = run_cli(command, "out/drafts", *(("--score", "text") * (command == "score")))
        assert (drafts.code, "name the run: out\n" in drafts.err) == (2, True), drafts.err
    saved = (here / "out/choices.jsonl").read_bytes()
    for choice, what in {
        "cat=edit-0": '"edit-0" is not a candidate of "cat"',
        "zz=none": '"zz" is not a line of this run',
        "cats=rule": "did you mean cat?",
        "cat-0=cat-0": '"cat-0" is not a line of this run',
    }.items():
        wrong = run_cli("pick", "out", "--choose", choice)
        assert (wrong.code, what in wrong.err) == (2, True), wrong.err
    for text, what in {
        '{"candidate_of": "zz", "picked": []}': "mine.jsonl:1",
        "no JSON": "save the file again",
        '{"candidate_of": "cat"}': "this line is not a choice",
        '{"candidate_of": "cat", "picked": [1]}': "this line is not a choice",
    }.items():
        (here / "mine.jsonl").write_text(text)  # without an end, which is not a kill here
        wrong = run_cli("pick", "out", "--choices", "mine.jsonl")
        assert (wrong.code, what in wrong.err) == (2, True), wrong.err
    assert (here / "out/choices.jsonl").read_bytes() == saved


PLANTED = """
from PIL import Image, ImageChops, ImageStat

SCORERS = {"still": {"needs": ["source", "result"]}, "blue": {"needs": ["result"]}}


def still(cases, options):
    return [-far(case["sources"][0], case["result"]) for case in cases]


def far(*paths):
    pictures = [Image.open(path).convert("RGB") for path in paths]
    return sum(ImageStat.Stat(ImageChops.difference(*pictures)).mean)


def blue(cases, options):
    return [ImageStat.Stat(Image.open(case["result"]).convert("RGB")).mean[2] for case in cases]
"""


def plant(folder: Path) -> None:
    """A run of three candidates of one edit: a blue circle, the unchanged source, a bluer one."""
    source = Image.open(SOURCE).convert("RGB")
    (folder / "out/outputs").mkdir(parents=True)
    source.save(folder / "circle.png")
    lines, results = [], []
    for number, share in enumerate((0.7, 0.0, 1.0)):
        pixels = np.asarray(source).astype(float)
        is_circle = (pixels[..., 0] > 150) & (pixels[..., 1] < 110)
        pixels[is_circle] += share * (np.array([30, 60, 220]) - pixels[is_circle])
        name, drawn = f"edit-{number}", pixels.astype(np.uint8)
        path = folder / f"out/outputs/{name}.png"
        Image.fromarray(drawn).save(path)
        lineage = {"custom_id": name, "candidate_of": "edit", "candidate": number}
        line = {"task": "it2i", "prompt": "make the circle blue", "model": "tiny-image"}
        lines.append(lineage | line | {"images": ["../circle.png"]})
        output = {"path": f"outputs/{name}.png", "pixel_sha256": pixel_digest(drawn)}
        output |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "seed": number}
        results.append(lineage | {"status": "done", "key": name, "outputs": [output]})
    for name, entries in (("manifest.resolved.jsonl", lines), ("results.jsonl", results)):
        (folder / "out" / name).write_text("".join(f"{json.dumps(one)}\n" for one in entries))
    (folder / "mine.py").write_text(PLANTED)


def test_an_edit_that_changed_nothing_is_rejected_and_shown(tmp_path: Path, run_cli: Run) -> None:
    plant(tmp_path)
    flags = ("--score", "mine.py:still", "--score", "mine.py:blue")
    assert run_cli("score", "out", *flags).code == 0
    assert run_cli("pick", "out", "--by", "still").code == 0
    assert read_picks(tmp_path / "out")["edit"]["picked"] == ["edit-1"], "what changes least"
    assert run_cli("score", "out", "--score", "outside").code == 0
    assert run_cli("pick", "out", "--by", "blue,outside").code == 0
    line = read_picks(tmp_path / "out")["edit"]
    assert line["rejected"][0]["custom_id"] == "edit-1"
    assert line["rejected"][0]["reasons"] == ["none: no edit was found"]
    assert run_cli("report", "out").code == 0
    assert '"none: no edit was found"' in (tmp_path / "out/report/picks.js").read_text()


def test_reasons_of_missing_values_are_printed(tmp_path: Path, run_cli: Run) -> None:
    plant(tmp_path)
    (tmp_path / "bad.py").write_text(
        "SCORERS = {'bad': {'needs': ['result']}}\n"
        "def bad(cases, options):\n    raise ValueError('no weights')\n"
    )
    flags = ("--score", "bad.py:bad", "--score", "mine.py:blue", "--score", "text")
    for _ in range(2):
        said = run_cli("score", "out", *flags).err
        assert "bad: 3 candidates without a value: ValueError: no weights" in said
        assert "text: 3 candidates skipped: no text to show to it" in said
    picked = run_cli("pick", "out")
    assert picked.code == 0
    assert "bad has no value in this run, so it does not count" in picked.err
    gated = run_cli("pick", "out", "--min", "text=0.5")
    assert gated.code == 1
    assert "1 line, 0 with an accepted candidate; rejected: not scored by text: 3" in gated.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("pick", "out", "--rounds", "2"), "higher --n"),
        (("generate", "jobs.jsonl", "--audit", "text"), "--by NAME"),
        (("pick", "out", "--score", "text"), "choose scorers with hyimg pick --by"),
    ],
)
def test_options_that_were_removed_say_what_to_do(
    run_cli: Run, words: tuple[str, ...], hint: str
) -> None:
    refused = run_cli(*words)
    assert (refused.code, "was removed" in refused.err, hint in refused.err) == (2, True, True)


def test_merged_folders_keep_their_scores(
    tmp_path: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path)
    score = ("--score", "mine.py:blue")
    assert run_cli("score", "out", *score).code == 0
    assert run_cli("merge", "out", "-o", "all").code == 0
    forbid_processes(monkeypatch)
    assert run_cli("score", "all", *score).code == 0
    assert run_cli("pick", "all").code == 0
    assert read_picks(tmp_path / "all")["edit"]["picked"] == ["edit-2"]


def test_texts_are_scored_and_picked_before_anything_is_drawn(here: Path, run_cli: Run) -> None:
    think = ("think", "jobs.jsonl", "--n", "3", "--vary", "text", "-o", "texts.jsonl", "-q")
    assert run_cli(*think, "--select", "cat*").code == 0
    lines = [json.loads(line) for line in (here / "texts.jsonl").read_text().splitlines()]
    # Of equal texts one counts.
    lines[2]["cot_text"], lines[2]["written"] = lines[0]["cot_text"], lines[0]["written"]
    lines[2]["cot_token_ids"] = lines[0]["cot_token_ids"]
    (here / "texts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert run_cli("score", "texts.jsonl", "--score", "text").code == 0
    scores = [json.loads(line) for line in (here / "texts.scores.jsonl").read_text().splitlines()]
    texts = {line["cot_text"] for line in lines}
    assert len([one for one in scores if "key" in one]) == len(texts)
    picked = run_cli("pick", "texts.jsonl", "-o", "picked.jsonl", "--json")
    (line,) = picked.json_lines
    assert "duplicate of cat-0" in [why for one in line["rejected"] for why in one["reasons"]]
    assert json.loads((here / "picked.jsonl").read_text())["custom_id"] == line["picked"][0]
    assert run_cli("check", "picked.jsonl").code == 0


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--draft-steps", "2"), "drafts need a scorer to choose by"),
        (("--draft-steps", "4", "--score", "text"), "saves nothing"),
        (("--score", "text", "--shard", "1/2"), "remove --shard"),
        (("--score", "text", "-o", "memory://out"), "an address"),
        (("--score", "text", "--min", "text=high"), "is not a gate"),
        (("--score", "text", "--max", "outside=3"), "no scorer is called"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_is_drawn(
    here: Path, run_cli: Run, flags: tuple[str, ...], what: str
) -> None:
    refused = run_cli(*COMMAND, *flags)
    assert refused.code == 2
    assert what in refused.err
    assert not (here / "out/results.jsonl").exists()


def test_a_file_that_lies_in_the_folder_names_no_scorer(here: Path, run_cli: Run) -> None:
    (here / "hyimg.toml").write_text('[candidates]\nscore = ["mine.py:random"]\n')
    refused = run_cli(*COMMAND)
    assert (refused.code, "cannot set score" in refused.err) == (2, True)
    assert run_cli(*COMMAND, "--recipe", "hyimg.toml", "--limit", "1").code == 0


def test_videos_are_refused(here: Path, run_cli: Run, write_manifest: Callable[..., Path]) -> None:
    write_manifest({"prompt": "a red circle", "task": "t2v"})
    refused = run_cli(*COMMAND, "--score", "text")
    assert (refused.code, "this is a video" in refused.err) == (2, True)


def test_scorers_are_named_by_flags_or_a_variable(
    here: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "texts.jsonl").write_text('{"custom_id": "a", "prompt": "a", "cot_text": "a"}\n')
    flags = ("--score", "text,mine.py:blind", "--score", "other=text")
    assert run_cli("score", "texts.jsonl", *flags).code == 0
    monkeypatch.setenv("HYIMG_SCORE", "again=text")
    assert run_cli("score", "texts.jsonl").code == 0
    lines = map(json.loads, (here / "texts.scores.jsonl").read_text().splitlines())
    assert {line["scorer"] for line in lines} == {"text", "blind", "other", "again"}
