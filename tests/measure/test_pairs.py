"""Pairs to compare, and errors if they are not clear."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hyimg_cli.errors import UsageError
from hyimg_cli.measure.pairs import Pair, find_pairs, folder_pairs, newest_bench, run_pairs

WritePicture = Callable[..., Path]


@pytest.fixture
def folders(tmp_path: Path, write_picture: WritePicture) -> tuple[Path, Path]:
    """Two folders: one name in both, one in a subfolder of both, one on each side alone."""
    names = {
        "a": ("both.png", "in/both.png", "left.png"),
        "b": ("both.png", "in/both.png", "r.png"),
    }
    for side in ("a", "b"):
        (tmp_path / side / "in").mkdir(parents=True)
        for name in names[side]:
            write_picture(f"{side}/{name}")
        (tmp_path / side / "notes.txt").write_text("passed over")
        write_picture(f"{side}/.hidden.png")
    return tmp_path / "a", tmp_path / "b"


def test_folders_are_paired_by_name(folders: tuple[Path, Path]) -> None:
    a, b = folders
    found = find_pairs(a, b, allow_unpaired=True)
    names = [pair.name for pair in found.pairs]
    assert names == ["both.png", "in/both.png"]
    assert found.pairs[1] == Pair("in/both.png", a / "in/both.png", b / "in/both.png")
    assert found.unpaired == "1 only in A: left.png; 1 only in B: r.png"


def test_another_format_is_a_counterpart_where_it_is_the_only_one(
    tmp_path: Path, write_picture: WritePicture
) -> None:
    names = {"a": ("cat.png", "x/dog.png", "two.png"), "b": ("cat.webp", "x/dog.webp", "two.webp")}
    for side in names:
        (tmp_path / side / "x").mkdir(parents=True)
        for name in names[side]:
            write_picture(f"{side}/{name}")
    write_picture("b/two.bmp")
    found = find_pairs(tmp_path / "a", tmp_path / "b", allow_unpaired=True)
    assert [pair.name for pair in found.pairs] == ["cat", "x/dog"]
    assert found.pairs[0].b == tmp_path / "b/cat.webp"
    assert found.unpaired == "1 only in A: two.png; 2 only in B: two.bmp, two.webp"


@pytest.mark.parametrize(
    ("in_a", "in_b", "paired"),
    [
        (["\u00e9.png"], ["e\u0301.png"], ["\u00e9.png"]),
        (["x/\u00e9/1.png"], ["x/e\u0301/1.png"], ["x/\u00e9/1.png"]),
        (["IMG.PNG"], ["img.png"], ["IMG.PNG"]),
        (["IMG.PNG"], ["img.webp"], ["IMG"]),
        (["\u00e9.png"], ["E\u0301.jpg"], ["\u00e9"]),
        (["Cat.png", "cat.png"], ["cat.png"], ["cat.png"]),
        (["Cat.png", "cat.png"], ["CAT.png"], []),  # which of the two is not clear
        (["Cat.png", "cat.png"], ["Cat.webp", "cat.webp"], ["Cat", "cat"]),
        (["Cat.png", "cat.jpg"], ["cat.png"], ["Cat.png"]),
        (["IMG.PNG", "IMG.JPG"], ["img.png", "img.jpg"], ["IMG.JPG", "IMG.PNG"]),
    ],
)
def test_names_that_differ_in_accents_or_case_are_paired_where_they_are_clear(
    tmp_path: Path, in_a: list[str], in_b: list[str], paired: list[str]
) -> None:
    for side, names in (("a", in_a), ("b", in_b)):
        for name in names:
            path = tmp_path / side / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    found = folder_pairs(tmp_path / "a", tmp_path / "b")
    assert sorted(pair.name for pair in found.pairs) == paired
    assert len({pair.b for pair in found.pairs}) == len(paired)
    assert len(found.only_a) == len(in_a) - len(paired)
    assert len(found.only_b) == len(in_b) - len(paired)


def test_pairs_are_in_natural_order(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for number in (1, 10, 2):
            (tmp_path / side / f"f{number}.png").touch()
    found = folder_pairs(tmp_path / "a", tmp_path / "b")
    assert [pair.name for pair in found.pairs] == ["f1.png", "f2.png", "f10.png"]


def test_names_without_counterpart_are_an_error(folders: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match=r"1 only in A: left\.png; 1 only in B: r\.png"):
        find_pairs(*folders)


def test_two_files_are_one_pair(write_picture: WritePicture) -> None:
    a, b = write_picture("a.png"), write_picture("b.png")
    assert find_pairs(a, b).pairs == (Pair("a.png, b.png", a, b),)


def test_two_folders_are_a_video_only_if_asked(folders: tuple[Path, Path]) -> None:
    (pair,) = find_pairs(*folders, as_video=True).pairs
    assert (pair.a, pair.b, pair.kind) == (*folders, "video")


def run_folder(folder: Path, write_picture: WritePicture, **status: str) -> Path:
    (folder / "outputs").mkdir(parents=True)
    lines = []
    for name, state in status.items():
        outputs = [{"path": f"outputs/{name}.png"}] if state == "done" else []
        lines.append({"custom_id": name, "status": state, "outputs": outputs})
        if outputs:
            write_picture(str(folder / "outputs" / f"{name}.png"))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "results.jsonl").write_text(text)
    return folder


def test_runs_are_paired_by_custom_id(tmp_path: Path, write_picture: WritePicture) -> None:
    one = run_folder(tmp_path / "1", write_picture, x="done", y="done", z="failed")
    two = run_folder(tmp_path / "2", write_picture, y="done", z="done", x="done")
    found = find_pairs(one, two, allow_unpaired=True)
    assert [pair.name for pair in found.pairs] == ["x", "y"]
    assert found.pairs[0].b == two / "outputs/x.png"
    assert (found.only_a, found.only_b) == ((), ("z",))


def test_frames_of_a_run_are_in_natural_order(tmp_path: Path) -> None:
    output = {"path": "outputs/a.mp4", "frames_path": "outputs/a.frames"}
    line = {"custom_id": "a", "status": "done", "outputs": [output]}
    for name in ("9999.png", "10000.png", "._9999.png"):
        path = tmp_path / "outputs/a.frames" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    found = run_pairs(tmp_path, tmp_path, by_frame=True)
    assert [pair.a.name for pair in found.pairs] == ["9999.png", "10000.png"]


def test_a_run_goes_with_a_run(
    tmp_path: Path, write_picture: WritePicture, folders: tuple[Path, Path]
) -> None:
    run = run_folder(tmp_path / "1", write_picture, x="done")
    with pytest.raises(UsageError, match="the other is not") as caught:
        find_pairs(folders[0], run)
    assert str(run / "outputs") in caught.value.hint


@pytest.mark.parametrize("side", [0, 1])
def test_a_run_in_a_store_is_copied_first(tmp_path: Path, side: int) -> None:
    """A path has lost a slash of the address."""
    places = [tmp_path, tmp_path]
    places[side] = Path("S3://runs/night")
    with pytest.raises(UsageError) as refused:
        find_pairs(*places)
    assert "s3://runs/night is in an object store" in refused.value.what
    hint = "copy the run to this machine: hyimg merge s3://runs/night -o FOLDER"
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ("missing.png", "x.png", "not found"),
        ("x.png", None, "it needs another"),
        ("folder", None, "it needs another"),
        ("folder", "x.png", "one is a folder"),
        ("folder", "folder", "nothing to compare"),
        ("x.png", "clip.mp4", "one is a video"),
    ],
)
def test_what_cannot_be_paired(
    tmp_path: Path, write_picture: WritePicture, a: str, b: str | None, text: str
) -> None:
    write_picture("x.png")
    (tmp_path / "folder").mkdir()
    (tmp_path / "clip.mp4").touch()
    with pytest.raises(UsageError, match=text):
        find_pairs(tmp_path / a, None if b is None else tmp_path / b)


def test_the_newest_bench_with_pictures_counts(tmp_path: Path) -> None:
    import os

    assert newest_bench(tmp_path, "kv-reuse") is None
    for age, name in enumerate(("old", "runs/new", "runs/newest-without-pictures")):
        bench = tmp_path / name
        for part in () if "without" in name else ("A", "B"):
            (bench / part).mkdir(parents=True)
        bench.mkdir(exist_ok=True)
        (bench / "bench.json").write_text('{"name": "kv-reuse"}')
        os.utime(bench / "bench.json", (age, age))
    assert newest_bench(tmp_path, "kv-reuse") == tmp_path / "runs/new"
    assert newest_bench(tmp_path / "old", "kv-reuse") == tmp_path / "old"
    assert newest_bench(tmp_path, "batching") is None
