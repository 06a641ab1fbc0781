"""What becomes a row, and what is rejected or left out with its reason; what libraries read."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export.runs import (
    LICENSED,
    answer,
    candidates,
    job,
    lone_jobs,
    picture,
    write_lines,
    write_run,
)

from hyimg_cli.export.formats import FORMATS, read_rows
from hyimg_cli.export.rows import Row, _pairs
from hyimg_cli.scoring.candidates import all_in, read_candidates

pytest.importorskip("pyarrow", reason="the extra [export] is not installed")

Export = Callable[..., dict[str, Any]]


def rows_of(folder: Path, start: str = "data") -> dict[str, dict[str, Any]]:
    info = json.loads((folder / "dataset.json").read_text())
    names = [name for name in info["files"] if name.startswith(start)]
    return {row["id"]: row for name in names for row in read_rows(folder / name, info["format"])}


def rejected_in(folder: Path) -> dict[str, list[str]]:
    lines = map(json.loads, (folder / "rejected.jsonl").read_text().splitlines())
    return {line["id"]: line["reasons"] for line in lines}


def test_picks_decide_and_every_reject_has_its_reason(export: Export, tmp_path: Path) -> None:
    run = candidates(tmp_path / "out")
    info = export(run, "-o", "data")
    assert rows_of(tmp_path / "data").keys() == {f"line{n}-2" for n in range(6)}
    row = rows_of(tmp_path / "data")["line3-2"]
    assert (row["rank"], row["scores"]) == (1, {"judge": 7.0, "judge.follows": 8.5})
    assert (row["candidate_of"], row["accepted"], row["seed"]) == ("line3", True, 32)
    assert row["licences"] == {"model": "unknown", "sources": "CC0-1.0"}
    assert json.loads(row["record"])["job"]["images"] == ["3.jpg"]
    rejected = rejected_in(tmp_path / "data")
    assert rejected.pop("line0-0") == ["judge.follows 5 < 7"]
    assert rejected.pop("line0-1") == ["rank 2 of 2"]
    assert rejected.pop("line0-3") == ["not scored: judge: timed out"]
    assert all(rejected.values())
    assert info["rejected"] == {"judge.follows": 6, "rank": 6, "not scored": 6}
    assert info["scorers"]["judge"]["licence"] == "apache-2.0"
    assert (
        "judge.follows at least 7, keep 1 of each line"
        in (tmp_path / "data" / "README.md").read_text()
    )


def test_jobs_that_are_not_selected_are_left_out_and_counted(
    export: Export, tmp_path: Path
) -> None:
    run = candidates(tmp_path / "out")
    info = export(run, "-o", "data", "--select", "line[01]*", "--select", "status=done")
    assert rows_of(tmp_path / "data").keys() == {"line0-2", "line1-2"}
    assert info["left_out"]["not selected"] > 0


@pytest.mark.parametrize("is_picked", [False, True])
def test_scores_are_those_of_every_scorer_that_ran(
    is_picked: bool, export: Export, tmp_path: Path
) -> None:
    """Without a pick, and of a scorer that ran after it."""
    run = candidates(tmp_path / "out") if is_picked else lone_jobs(tmp_path / "out")
    declared = {"needs": ["result"], "licence": "mit"}
    entries: list[dict[str, Any]] = [{"scorer": "late", "identity": "1", "declared": declared}]
    for one in all_in(read_candidates(run)):
        key = one.key("1", ["result"])
        entries.append({"key": key, "scorer": "late", "value": 0.5, "parts": {"sharp": 2.0}})
    write_lines(run / "scores.jsonl", entries)
    info = export(run, "-o", "data", "--format", "folder")
    of_pick = {"judge": 7, "judge.follows": 8.5} if is_picked else {}
    for row in rows_of(tmp_path / "data").values():
        assert row["scores"] == {"late": 0.5, "late.sharp": 2.0, **of_pick}
    written = json.loads((tmp_path / "data" / "dataset.json").read_text())
    assert written["scorers"]["late"]["licence"] == "mit"
    assert info["dataset_sha256"]


def test_pairs_are_of_one_line_and_of_judged_pictures(export: Export, tmp_path: Path) -> None:
    export(candidates(tmp_path / "out"), "-o", "data", "--rejected", "--split", "70/30")
    pairs, rows = rows_of(tmp_path / "data", "preference"), rows_of(tmp_path / "data")
    # Of one that was not scored nobody knows that it is worse.
    assert pairs.keys() == {f"line{n}-{i}" for n in range(6) for i in (0, 1)}
    for name, pair in pairs.items():
        best = rows[f"{name[:-2]}-2"]
        assert (pair["chosen"].data, pair["chosen_id"]) == (best["result"].data, best["id"])
        assert pair["rejected"].data != pair["chosen"].data
        assert pair["source_sha256"] == best["source_sha256"]
        assert (pair["accepted"], pair["chosen_scores"]["judge"]) == (False, 7.0)
    info = json.loads((tmp_path / "data" / "dataset.json").read_text())["counts"]
    assert info["preference/train"] == 2 * info["default/train"]


def test_pairs_are_with_the_best_of_several_accepted() -> None:
    def row(name: str, rank: int | None, *reasons: str) -> Row:
        columns = {"id": name, "rank": rank, "reasons": reasons, "pixel_sha256": name}
        return Row("default", "train", columns | {"result": name, "mask": None, "scores": {}})

    chosen = [row("third", 3), row("first", 1), row("second", 2)]
    (pair,) = _pairs(chosen, [row("worse", None, "text 1 < 2")])
    assert (pair.columns["chosen_id"], pair.columns["rejected"]) == ("first", "worse")


def test_a_person_and_a_stale_pick(export: Export, tmp_path: Path) -> None:
    run = candidates(tmp_path / "out", lines=4)
    lines = list(map(json.loads, (run / "picks.jsonl").read_text().splitlines()))
    lines[0] |= {"picked": ["line0-0"], "chosen_by": "person"}
    lines[1] |= {"missing": ["line1-2"]}
    write_lines(run / "picks.jsonl", lines[:3])
    export(run, "-o", "data")
    rows, rejected = rows_of(tmp_path / "data"), rejected_in(tmp_path / "data")
    assert rows.keys() == {"line0-0", "line2-2"}
    assert rows["line0-0"]["reasons"] == ["chosen by a person"]
    assert rejected["line0-2"] == ["rank 1 of 2"]
    assert rejected["line1-2"] == ["drawn in full after the last pick: run hyimg pick again"]
    assert rejected["line3-2"] == ["not in the last pick: run hyimg pick again"]


def test_a_choice_that_no_pick_has_counted_is_not_exported_as_the_rules_pick(
    export: Export, run_cli: Any, tmp_path: Path
) -> None:
    """The page's file was copied into the run: its lines wait for hyimg pick."""
    run = candidates(tmp_path / "out", lines=3)
    lines = list(map(json.loads, (run / "picks.jsonl").read_text().splitlines()))
    lines[1] |= {"picked": ["line1-0"], "chosen_by": "person"}
    write_lines(run / "picks.jsonl", lines)
    choices = {"line0": ["line0-0"], "line1": ["line1-0"], "line2": None}
    saved = [{"candidate_of": of, "picked": picked} for of, picked in choices.items()]
    write_lines(run / "choices.jsonl", saved)
    export(run, "-o", "data")
    assert rows_of(tmp_path / "data").keys() == {"line1-0", "line2-2"}
    why = "a choice was made after the last pick: run hyimg pick again"
    assert rejected_in(tmp_path / "data")["line0-0"] == [why]
    (run / "picks.jsonl").unlink()
    info = export(run, "-o", "unpicked")
    assert info["rejected"] == {why.partition(":")[0]: 8}
    assert run_cli("pick", run).code in (0, 1)
    export(run, "-o", "counted")
    assert {"line0-0", "line1-0"} <= rows_of(tmp_path / "counted").keys()


def test_damaged_picks_are_named(run_cli: Any, tmp_path: Path) -> None:
    run = candidates(tmp_path / "out", lines=1)
    write_lines(run / "picks.jsonl", [{"candidate_of": "line0", "ranking": [{"rank": "first"}]}])
    ran = run_cli("export", run, "-o", "data", *LICENSED)
    assert (ran.code, 'picks.jsonl is damaged at "line0"' in ran.err) == (2, True), ran.err


def test_no_source_is_in_two_splits(export: Export, tmp_path: Path) -> None:
    out = tmp_path / "out"
    jobs = [job(out, f"j{n}", n, [n % 9, (n * 5) % 9][: 1 + n % 2]) for n in range(40)]
    export(write_run(out, jobs), "-o", "data", "--split", "60/20/20")
    splits: dict[str, set[str]] = {}
    for split in ("train", "validation", "test"):
        for row in rows_of(tmp_path / "data", f"data/{split}").values():
            for source in row["source_sha256"]:
                splits.setdefault(source, set()).add(split)
    assert {len(names) for names in splits.values()} == {1}
    assert len(set.union(*splits.values())) > 1
    rejected = rejected_in(tmp_path / "data")
    assert len(rows_of(tmp_path / "data")) + len(rejected) == 40
    assert set(map(tuple, rejected.values())) == {("source in the other split",)}


def test_no_pixels_are_twice(export: Export, tmp_path: Path) -> None:
    """Of two runs with one manifest, the later picture goes; one that differs gets its own id."""
    first = write_run(tmp_path / "a" / "out", [job(tmp_path / "a" / "out", "x", 1), *()])
    again = [job(tmp_path / "b" / "out", "x", 1), job(tmp_path / "b" / "out", "y", 1)]
    second = write_run(tmp_path / "b" / "out", again)
    third = write_run(tmp_path / "c" / "out", [job(tmp_path / "c" / "out", "x", 2)])
    info = export(first, second, third, "-o", "data")
    assert rows_of(tmp_path / "data").keys() == {"x@00000001", "x@00000002"}
    assert rejected_in(tmp_path / "data") == {"y": ["duplicate of x@00000001"]}
    assert info["left_out"] == {"the same job is in another run": 1}
    assert info["rejected"] == {"duplicate": 1}


def test_what_has_no_row_is_counted(export: Export, run_cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    jobs = [job(out, name, n, [n]) for n, name in enumerate("abcdefgh")]
    jobs[0]["result"] |= {"status": "failed", "outputs": []}
    jobs[1]["result"]["outputs"][0]["path"] = "outputs/b.mp4"
    jobs[2]["result"]["draft_of"] = "c"
    run = write_run(out, jobs)
    (out / "outputs" / "d.png").unlink()
    picture(out / "outputs" / "e.png", 99)
    picture(tmp_path / "photos" / "5.jpg", 99)
    info = export(run, "-o", "data", code=1)
    assert rows_of(tmp_path / "data").keys() == {"g", "h"}
    gone = {"its files are missing or changed": 3}
    assert info["left_out"] == {"failed": 1, "a video": 1, "a draft": 1} | gone
    ran = run_cli("export", run, "-o", "data", *LICENSED)
    assert ran.code == 1
    assert "left out f: " in ran.err
    assert "5.jpg: not the file that the run read or wrote" in ran.err


def test_a_run_cannot_have_any_file_published(export: Export, tmp_path: Path) -> None:
    """Of a line that names a file of its reader's, in a run that somebody else made."""
    out = tmp_path / "out"
    jobs = [job(out, "a", 1, [1]), job(out, "b", 2, [2])]
    (tmp_path / "key.png").write_text("a secret")
    jobs[0]["images"] = ["../key.png"]
    del jobs[0]["result"]["source_sha256"]
    export(write_run(out, jobs), "-o", "data", code=1)
    assert rows_of(tmp_path / "data").keys() == {"b"}


def test_sources_may_stay_at_home(export: Export, run_cli: Any, tmp_path: Path) -> None:
    run = lone_jobs(tmp_path / "out")
    words = ("export", run, "-o", "data", "--allow-licence", "unknown")
    ran = run_cli(*words)
    assert (ran.code, "error[export.source-licence]: the source pictures of 8 " in ran.err) == (
        2,
        True,
    ), ran.err
    assert run_cli(*words, "--sources", "by-hash").code == 0
    rows = rows_of(tmp_path / "data")
    assert not any(row.get("source") for row in rows.values())
    assert len(rows["cat2"]["source_sha256"]) == 2


def test_a_line_names_its_own_sources_licence(export: Export, tmp_path: Path) -> None:
    out = tmp_path / "out"
    jobs = [job(out, "a", 1, [1], metadata={"licence": "CC-BY-4.0"}), job(out, "b", 2, [1])]
    info = export(write_run(out, jobs), "-o", "data")
    assert info["licences"]["sources"] == {"CC-BY-4.0": 1, "CC0-1.0": 1}
    assert rows_of(tmp_path / "data")["a"]["licences"]["sources"] == "CC-BY-4.0"


def test_half_a_surrogate_pair_is_no_obstacle(export: Export, tmp_path: Path) -> None:
    jobs = [job(tmp_path / "out", "a", 1)]
    jobs[0]["prompt"] = "half \ud83d of it"
    run = write_run(tmp_path / "out", jobs)
    hashes = {export(run, "-o", f, "--format", f)["dataset_sha256"] for f in FORMATS}
    assert len(hashes) == 1
    assert rows_of(tmp_path / "parquet")["a"]["instruction"] == "half \\ud83d of it"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere", "-o", "data"), "not the output folder of a run"),
        (("out",), "no folder to write to is given"),
        (("out", "-o", "data", "--split", "98/x"), "--split 98/x is not known"),
        (("out", "-o", "data", "--format", "zip"), "'zip' is not known"),
        (("out", "-o", "s3://b/data"), "is not a path on this machine"),
        (("--verify", "out"), "no finished dataset"),
        (("--verify", "out", "out"), "--verify takes one dataset"),
    ],
)
def test_a_wrong_command_line(
    run_cli: Any, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    lone_jobs(tmp_path / "out")
    ran = run_cli("export", *words)
    assert (ran.code, said in ran.err) == (2, True), ran.err


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_datasets_reads_every_row(
    form: str, export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    mixed = export(lone_jobs(tmp_path / "a" / "out"), "-o", "mixed", "--format", form)
    words = ("--rejected", "--split", "70/30", "--shards", 2, "--format", form)
    pairs = export(candidates(tmp_path / "b" / "out"), "-o", "pairs", *words)
    for folder, info in (("mixed", mixed), ("pairs", pairs)):
        found = {}
        for config in dict.fromkeys(name.split("/")[0] for name in info["counts"]):
            read = datasets.load_dataset(
                str(tmp_path / folder), config, cache_dir=str(tmp_path / "cache")
            )
            for split, rows in read.items():
                found[f"{config}/{split}"] = len(rows)
                last = rows[len(rows) - 1]
                facts = last.get("json", last)
                picture = {"default": "result", "preference": "chosen"}[config]
                pictures = [last[name] for name in last if name.startswith(picture)]
                assert any(getattr(one, "size", None) == (8, 8) for one in pictures)
                assert facts["row_sha256"]
        assert found == info["counts"]


# Its readers leave their files to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestWarning")
def test_webdataset_reads_every_row(export: Export, tmp_path: Path) -> None:
    import webdataset

    run = lone_jobs(tmp_path / "out")
    export(run, "-o", "data", "--format", "webdataset", "--shards", 2)
    shards = sorted(map(str, (tmp_path / "data" / "data").iterdir()))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False))
    read = {json.loads(one["json"])["id"]: one for one in samples}
    lines = list(map(json.loads, (run / "results.jsonl").read_text().splitlines()))
    assert read.keys() == {line["custom_id"] for line in lines}
    for line in lines:
        path = run / line["outputs"][0]["path"]
        assert read[line["custom_id"]][f"result{path.suffix}"] == path.read_bytes()
    del samples
    gc.collect()


@pytest.mark.parametrize("form", FORMATS)
def test_answers_are_rows_of_their_own_configuration(
    form: str, export: Export, tmp_path: Path
) -> None:
    """With and without pictures, by choice too; picks are about pictures alone."""
    folder = tmp_path / "out"
    jobs = [
        job(folder, "cat", 0, [3]),
        answer(folder, "what", "a cat", [3, 4]),
        answer(folder, "again", "a cat", [3, 4]),
        answer(folder, "open", "yes", [3]),
        answer(folder, "silent", None, [3]),
        answer(folder, "hello", "hello"),
    ]
    write_run(folder, jobs)
    # A pick that has not seen any of these.
    picks = {"candidate_of": "dog", "picked": [], "missing": [], "chosen_by": "rule"}
    picks |= {"ranking": [], "rejected": [], "rule": {}}
    write_lines(folder / "picks.jsonl", [picks])
    info = export(folder, "-o", "data", "--format", form, "--rejected")
    rows = rows_of(tmp_path / "data", "answers")
    assert rows.keys() == {"what", "open", "hello"}
    rejected = rejected_in(tmp_path / "data")
    assert rejected.pop("cat") == ["not in the last pick: run hyimg pick again"]
    assert rejected == {"again": ["duplicate of what"]}
    assert info["left_out"] == {"without an answer": 1}
    assert info["counts"] == {"answers/train": 3}
    what, chosen = rows["what"], rows["open"]
    assert (what["answer"], what["text"], what["finish"]) == ("a cat", "A thought.", "stop")
    assert (what["logprob"], what["tokens"], len(what["source"])) == (-0.5, 3, 2)
    assert what["source"][0].data == (tmp_path / "photos/3.jpg").read_bytes()
    assert (chosen["answer"], chosen["choices"]) == ("yes", ["yes", "no"])
    assert (chosen["probabilities"], chosen["mass"]) == ([0.9, 0.1], 0.75)
    (folder / "outputs/what.txt").write_text("a dog")
    info = export(folder, "-o", "changed", "--format", form, code=1)
    assert rows_of(tmp_path / "changed", "answers").keys() == {"again", "open", "hello"}
