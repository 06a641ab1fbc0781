"""Datasets of made-up runs: one hash in every format, whatever is killed, and what verify finds."""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from export.runs import LICENSED, candidates, lone_jobs

from hyimg_cli import files
from hyimg_cli.errors import StorageError
from hyimg_cli.export import dataset
from hyimg_cli.export.columns import Picture, dataset_digest, row_digest
from hyimg_cli.export.formats import FORMATS, read_rows, write_rows
from hyimg_cli.export.rows import ExportRequest

pytest.importorskip("pyarrow", reason="the extra [export] is not installed")

Export = Callable[..., dict[str, Any]]


def rows_of(folder: Path, config: str = "data") -> list[dict[str, Any]]:
    info = json.loads((folder / "dataset.json").read_text())
    return [
        row
        for name in info["files"]
        if name.startswith(config)
        for row in read_rows(folder / name, info["format"])
    ]


def test_every_format_and_number_of_shards_has_one_hash(
    export: Export, run_cli: Any, tmp_path: Path
) -> None:
    run = lone_jobs(tmp_path / "out")
    hashes = set()
    for form in FORMATS:
        for shards in (1, 2, 4):
            info = export(run, "-o", f"{form}{shards}", "--format", form, "--shards", shards)
            assert len(info["files"]) == shards + 1, "and rejected.jsonl"
            hashes.add(info["dataset_sha256"])
            ran = run_cli("export", "--verify", f"{form}{shards}")
            assert (ran.code, "equal: 12 rows" in ran.err) == (0, True), ran.err
    assert len(hashes) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_every_row_holds_the_files_bytes(form: str, export: Export, tmp_path: Path) -> None:
    run = lone_jobs(tmp_path / "out")
    export(run, "-o", form, "--format", form, "--shards", 2)
    found = {row["id"]: row for row in rows_of(tmp_path / form)}
    for line in map(json.loads, (run / "results.jsonl").read_text().splitlines()):
        row = found.pop(line["custom_id"])
        assert row["result"].data == (run / line["outputs"][0]["path"]).read_bytes()
        assert [one.sha256 for one in row.get("source") or ()] == line.get("source_sha256", [])
        assert "mine" not in row["record"], "a line's own data stays with its user"
    assert not found


class Killed(BaseException):
    """The end of a process, which does not tidy up."""


def killed_exports(patch: pytest.MonkeyPatch, export: Callable[[], object]) -> Iterator[int]:
    """End an export at its first rename, its second, and so on, until one ends by itself; before
    each rename a file was written. Yields after each kill, and how many exports there were.
    """
    replace = files.os.replace
    for nth in count():
        left = iter(range(nth))

        def killed(*paths: Any, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Killed
            replace(*paths)

        with patch.context() as patched:
            patched.setattr(files.os, "replace", killed)
            patched.setattr(files, "remove", lambda path: None)
            try:
                export()
                return
            except Killed:
                pass
        yield nth


@pytest.mark.parametrize("form", FORMATS)
def test_a_kill_at_any_write_is_resumed(
    form: str, export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = candidates(tmp_path / "out", lines=3)
    words = (run, "-o", "kept", "--format", form, "--shards", 2, "--rejected", "--split", "70/30")
    expected, kept = export(*words), tmp_path / "kept"
    names = sorted(kept.rglob("*"))
    shutil.rmtree(kept)
    kills = 0
    for nth in killed_exports(monkeypatch, lambda: export(*words)):
        kills = nth + 1
        assert not (kept / dataset.INFO).exists()
        assert export(*words) == expected
        assert sorted(kept.rglob("*")) == names
        shutil.rmtree(kept)
    # A state, each shard and its state, the lists of rejects, the card, dataset.json.
    assert kills == 2 * (len(expected["files"]) - 1) + 4


def test_a_kill_while_another_dataset_is_replaced(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (lone_jobs(tmp_path / "out"), "-o", "kept", "--format", "webdataset")
    expected, kept = export(*words, "--shards", 1), tmp_path / "kept"
    names = sorted(kept.rglob("*"))
    export(*words, "--shards", 3, "--force")
    for _ in killed_exports(monkeypatch, lambda: export(*words, "--shards", 1, "--force")):
        assert export(*words, "--shards", 1, "--force") == expected
        assert sorted(kept.rglob("*")) == names
        export(*words, "--shards", 3, "--force")


def test_a_whole_shard_is_not_written_again(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (lone_jobs(tmp_path / "out"), "-o", "data", "--shards", 3)
    files_before = export(*words)["files"]
    first, second, _ = sorted((tmp_path / "data" / "data").iterdir())
    kept = first.stat().st_mtime_ns
    second.unlink()
    assert export(*words)["files"] == files_before
    assert first.stat().st_mtime_ns == kept
    assert second.exists()


CHANGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a byte": (lambda folder, shard: flip(shard, 300), "its bytes differ"),
    "the last byte": (lambda folder, shard: flip(shard, -1), "its bytes differ"),
    "a missing shard": (lambda folder, shard: shard.unlink(), "missing"),
    "half a shard": (lambda folder, shard: cut(shard), "cannot be read to its end"),
    "one more": (lambda folder, shard: shutil.copy(shard, f"{shard}.copy"), "not part of"),
    "a reason": (lambda folder, shard: flip(folder / "rejected.jsonl", -3), "its bytes differ"),
}


@pytest.fixture
def verified(run_cli: Any) -> Callable[[str], list[str]]:
    """What differs in a dataset."""

    def run(form: str) -> list[str]:
        ran = run_cli("export", "--verify", form, "--json")
        assert ran.code == 1, ran.err
        return list(json.loads(ran.out)["differences"])

    return run


def flip(path: Path, index: int) -> None:
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
@pytest.mark.parametrize("what", CHANGES)
def test_verify_names_what_differs(
    form: str, what: str, export: Export, verified: Any, tmp_path: Path
) -> None:
    export(candidates(tmp_path / "out"), "-o", form, "--format", form, "--shards", 2)
    change, said = CHANGES[what]
    shard = min((tmp_path / form / "data").iterdir())
    change(tmp_path / form, shard)
    differences = verified(form)
    name = "rejected.jsonl" if what == "a reason" else shard.name
    assert any(name in one and said in one for one in differences), differences


@pytest.mark.parametrize("name", ["licences", "rules", "scorers", "runs", "a new one"])
def test_verify_covers_what_dataset_json_says(
    name: str, export: Export, verified: Any, tmp_path: Path
) -> None:
    export(candidates(tmp_path / "out"), "-o", "data", "--format", "folder")
    path = tmp_path / "data" / "dataset.json"
    info = json.loads(path.read_text())
    info[name] = "CC0-1.0"
    path.write_text(json.dumps(info))
    (difference,) = verified("data")
    assert difference.startswith("dataset.json: ")


@pytest.mark.parametrize("name", ["counts", "rows", "nbytes"])
def test_verify_counts_again(name: str, export: Export, verified: Any, tmp_path: Path) -> None:
    export(candidates(tmp_path / "out"), "-o", "data", "--format", "folder")
    path = tmp_path / "data" / "dataset.json"
    info = json.loads(path.read_text())
    shard = next(iter(info["files"]))
    counts = info["counts"] if name == "counts" else info["files"][shard]
    counts[next(iter(counts)) if name == "counts" else name] += 1
    path.write_text(json.dumps(info))
    (difference,) = verified("data")
    assert difference.startswith("counts: " if name == "counts" else f"{shard}: ")


def test_a_datasets_hash_is_of_its_rows_in_any_order() -> None:
    """As its documentation describes it: of the sorted digests, each on a line."""
    expected = hashlib.sha256(b"a\nb\nc\n").hexdigest()
    for rows in ("abc", "cab"):
        assert dataset_digest(rows) == expected


def test_a_file_that_changes_during_an_export_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"as planned")
    picture = Picture.of(path, "png")
    assert picture.data == b"as planned"
    path.write_bytes(b"other data")
    with pytest.raises(StorageError, match="changed during the export") as refused:
        _ = picture.data
    assert (refused.value.code, refused.value.where) == ("export.changed", str(path))


def test_a_rows_hash_tells_0_and_false_from_nothing() -> None:
    rows = ({}, {"seed": 0}, {"seed": False}, {"scores": {"text": 0.0}})
    assert len({row_digest("default", "train", row) for row in rows}) == len(rows)
    assert row_digest("default", "train", {"a": None, "b": []}) == row_digest(
        "default", "train", {}
    )


@pytest.mark.parametrize("form", FORMATS)
def test_verify_names_a_changed_row(
    form: str, export: Export, verified: Any, tmp_path: Path
) -> None:
    """A picture in its place, by somebody who knows the format."""
    run = lone_jobs(tmp_path / "out")
    info = export(run, "-o", form, "--format", form)
    name = next(iter(info["files"]))
    path, rows = tmp_path / form / name, rows_of(tmp_path / form)
    files.remove(path)
    row = next(row for row in rows if row["id"] == "a.c1")
    row["result"] = rows[0]["result"]
    kinds = dataset.columns_of("default", ())
    full = [dict.fromkeys(kinds) | {"source": []} | one for one in rows]
    write_rows(path, form, full, kinds, 0)
    differences = verified(form)
    assert f"{name}: the row 'a.c1' was changed" in differences
    assert sum("was changed" in one for one in differences) == 1
    assert any(one.startswith("dataset hash: ") for one in differences)


def test_a_folder_of_anything_else_is_left_alone(
    export: Export, run_cli: Any, tmp_path: Path
) -> None:
    run = lone_jobs(tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    ran = run_cli("export", run, "-o", "mine", *LICENSED, "--force")
    assert (ran.code, "error[export.not-empty]" in ran.err) == (2, True)
    export(run, "-o", "data", "--shards", 3)
    before = sorted((tmp_path / "data").rglob("*"))
    ran = run_cli("export", run, "-o", "data", *LICENSED, "--shards", 2)
    assert (ran.code, "error[export.other-dataset]" in ran.err) == (2, True)
    assert sorted((tmp_path / "data").rglob("*")) == before
    export(run, "-o", "data", "--shards", 2, "--force")
    assert len(list((tmp_path / "data" / "data").iterdir())) == 2


def test_a_name_in_dataset_json_reaches_no_other_file(
    export: Export, run_cli: Any, tmp_path: Path
) -> None:
    run = lone_jobs(tmp_path / "out")
    info = export(run, "-o", "data")
    other = tmp_path / "precious.parquet"
    other.write_bytes(b"x")
    info["files"] |= {"../precious.parquet": {}, "data/../../precious.parquet": {}, ".": {}}
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(info))
    assert run_cli("export", "--verify", "data").code == 1
    export(run, "-o", "data", "--shards", 2, "--force")
    assert other.exists()


def test_an_edited_card_stays(export: Export, tmp_path: Path) -> None:
    run, card = lone_jobs(tmp_path / "out"), tmp_path / "data" / "README.md"
    export(run, "-o", "data")
    card.write_text("mine")
    export(run, "-o", "data")
    assert card.read_text() == "mine"
    export(run, "-o", "data", "--shards", 2, "--force")
    assert "Dataset hash" in card.read_text()


def test_a_link_leads_nowhere(run_cli: Any, tmp_path: Path) -> None:
    run, other = lone_jobs(tmp_path / "out"), tmp_path / "other"
    other.mkdir()
    (other / ".mine.1.tmp").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data").symlink_to(other)
    ran = run_cli("export", run, "-o", "data", *LICENSED)
    assert (ran.code, "error[output.link]" in ran.err) == (2, True), ran.err
    assert [one.name for one in other.iterdir()] == [".mine.1.tmp"]


def test_two_exports_do_not_share_a_folder(export: Export, run_cli: Any, tmp_path: Path) -> None:
    run = lone_jobs(tmp_path / "out")
    with dataset._locked(tmp_path / "data"):
        ran = run_cli("export", run, "-o", "data", *LICENSED)
    assert (ran.code, "error[output.in-use]" in ran.err) == (2, True)
    export(run, "-o", "data")


def test_shards_grow_to_their_bytes(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lone_jobs(tmp_path / "out")
    monkeypatch.setattr(dataset, "MAX_GROUP_BYTES", 2000)
    info = export(run, "-o", "data")
    shards = [one for one in info["files"].values() if "rows" in one]
    assert len(shards) > 3
    assert all(one["nbytes"] <= 2000 or one["rows"] == 1 for one in shards)
    assert sum(one["rows"] for one in shards) == 12


@pytest.mark.parametrize("shares", ["98/2", "80/10/10"])
def test_splits_have_their_shares(shares: str) -> None:
    options = ExportRequest((), Path("data"), "parquet", shares)
    drawn = [options.split_of(hashlib.sha256(str(n).encode()).hexdigest()) for n in range(5000)]
    names = dict.fromkeys(drawn)
    for name, share in zip(
        sorted(names, key=("train", "validation", "test").index),
        map(int, shares.split("/")),
        strict=True,
    ):
        assert abs(drawn.count(name) / 50 - share) < 2.5


def test_equal_shards_are_equal_bytes(export: Export, tmp_path: Path) -> None:
    run = lone_jobs(tmp_path / "out")
    for form in FORMATS:
        one, two = (export(run, "-o", f"{form}{n}", "--format", form) for n in "ab")
        assert one == two


def test_a_tar_has_keys_without_names(export: Export, tmp_path: Path) -> None:
    export(lone_jobs(tmp_path / "out"), "-o", "tars", "--format", "webdataset", "--shards", 2)
    names = list[str]()
    for path in sorted((tmp_path / "tars" / "data").iterdir()):
        with tarfile.open(path) as tar:
            names += tar.getnames()
    assert len({name.partition(".")[0] for name in names}) == 12
    assert {name for name in names if name.startswith("000000003.")} == {
        "000000003.json",
        "000000003.result.png",
    }
