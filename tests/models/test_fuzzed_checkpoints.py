"""Every value of every JSON file of a checkpoint replaced: refused, or drawn with.

A value that makes the line one that the model does not take ends with exit code 2, others with 3. A
few values of each family in the suite; under the mark `thorough` all of the embedded model's, and
100 of each other family (SEED=N takes others): what a library alone reads may fail an editor's job.
"""

import json
import os
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_editors
from every_checkpoint import FOLDERS, WRITERS
from tiny_video import START_KINDS

import hyimg_cli

PACKAGE = Path(hyimg_cli.__file__).parent
GONE = object()
ODD = (None, True, -1, 0, 1.5, 10**30, 1e308, "x", [], [[1, "x", None]], {}, {"a": {"b": []}}, GONE)
PICTURE: dict[str, Any] = {"prompt": "a red circle", "seed": 1}
VIDEO: dict[str, Any] = {
    "task": "t2v", "prompt": "a dog", "num_inference_steps": 1, "seed": 1, "size": "32x32",
    "num_frames": 5,
}  # fmt: skip
START = VIDEO | {"task": "i2v", "images": ["in.png"]}
WORLD = START | {"size": "32x48", "num_frames": 9, "num_inference_steps": 4, "camera": "none-1"}
# Families whose files hyimg itself reads.
OURS = ("tiny-image", "official", "bagel")
PICTURES = (*OURS, *tiny_editors.PIPELINES)
# Of both kinds of layout, those that differ most.
QUICK = {"tiny-image": 8, "official": 1, "bagel": 20, "tiny-video": 4, "flf": 4, "lingbot": 3}
QUICK |= {"kontext": 4, "longcat": 2, "klein": 2}


def line_of(family: str) -> dict[str, Any]:
    if family in tiny_editors.PIPELINES:
        edit = {"task": "it2i", "images": ["in.png"]} if "edit" in family else {"size": "64x64"}
        return PICTURE | edit | ({} if "turbo" in family else {"steps": 2})
    if family in PICTURES:
        return PICTURE | ({"steps": 2} if family == "bagel" else {"steps": 1, "max_new_tokens": 4})
    if family == "lingbot":
        return WORLD
    if family in START_KINDS:
        return START | {"images": ["in.png"] * (2 if family == "flf" else 1)}
    return VIDEO


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands, and all in it: the ends of long lists and of vocabularies."""
    yield at
    if isinstance(value, dict):
        names = list(value)
        for name in names if len(names) < 60 else names[:: len(names) - 1]:
            yield from places(value[name], (*at, name))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} & set(range(len(value)))):
            yield from places(value[index], (*at, index))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """`value` with another one at a place, or with none there."""
    if not at:
        return new
    first, *rest = at
    held = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    held[first] = replaced(held[first], tuple(rest), new)
    if held[first] is GONE:
        del held[first]
    return held if isinstance(value, dict) else list(held.values())


def raised_in(trace: Any) -> Path:
    return Path(traceback.extract_tb(trace)[-1].filename)


def every_case(folder: Path) -> list[tuple[Path, tuple[Any, ...], Any]]:
    return [
        (path.relative_to(folder), at, new)
        for path in sorted(folder.rglob("*.json"))
        for at in places(json.loads(path.read_text(encoding="utf-8")))
        for new in ODD
        if at or new is not GONE
    ]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made = dict(FOLDERS)

    def find(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("fuzzed") / family
            WRITERS[family](made[family])
        return made[family]

    return find


@pytest.mark.parametrize(
    ("family", "count"),
    [
        *QUICK.items(),
        *(
            pytest.param(
                family,
                None if family == "tiny-image" else 100,
                marks=[pytest.mark.thorough, pytest.mark.timeout(1800)],
            )
            for family in (*FOLDERS, *WRITERS)
        ),
    ],
)
def test_no_value_ends_in_an_error_of_ours(
    family: str,
    count: int | None,
    folder_of: Callable[[str], Path],
    run_cli: Any,
    write_manifest: Any,
    write_picture: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, flag = folder_of(family), "--model" if family in PICTURES else "--video-model"
    write_manifest(line_of(family))
    write_picture("in.png", (48, 32))
    cases = every_case(folder)
    chance = random.Random(family + os.environ.get("SEED", ""))
    cases = cases if count is None else chance.sample(cases, count)
    ends = Counter[str]()
    for number, (file, at, new) in enumerate(cases):
        copy = tmp_path / str(number)
        for path in folder.rglob("*"):
            if path.is_file() and path.relative_to(folder) != file:
                (copy / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
                os.symlink(path, copy / path.relative_to(folder))
        value = json.loads((folder / file).read_text(encoding="utf-8"))
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_text(json.dumps(replaced(value, at, new)), encoding="utf-8")
        ran = run_cli(
            *("generate", "jobs.jsonl", "-o", f"out{number}", "--device", "cpu", "--no-prewarm"),
            *(flag, copy),
        )
        case = f"{family}/{file} {at}: {'gone' if new is GONE else new!r}"
        ends[(re.findall(r"^error\[(.*?)\]", ran.err, re.M) or ["drawn"])[0]] += 1
        assert ran.code in (0, 1, 2, 3), f"{case}\n{ran.err}"
        if count == QUICK.get(family) or family in OURS:
            assert "job.internal" not in ran.err, f"{case}\n{ran.err}"
        for bug in (one.exc_info[2] for one in caplog.records if one.exc_info):
            assert not raised_in(bug).is_relative_to(PACKAGE), f"{case}\n{ran.err}"
        caplog.clear()  # what a record's frames hold: a model each time
        if ran.code == 2:
            assert "error[manifest." in ran.err, f"{case}\n{ran.err}"
        if ran.code == 3:
            assert "\n  --> " in ran.err, f"{case}\n{ran.err}"
            assert "\n  hint: " in ran.err, f"{case}\n{ran.err}"
    if len(cases) >= 20:  # some draw, and no check refuses all others
        (_, most), *_ = (ends - Counter(drawn=ends["drawn"])).most_common(1) or [("", 0)]
        assert ends["drawn"] >= len(cases) / 20, ends
        assert most <= len(cases) * 3 / 4, ends


@pytest.mark.parametrize("error", [AttributeError, KeyError, TypeError])
def test_an_error_of_ours_while_loading_is_internal(
    error: type[Exception], run_cli: Any, write_manifest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a checkpoint to download again."""

    def fail(*_: object, **__: object) -> None:
        raise error("ours")

    monkeypatch.setattr("hyimg_cli.models.hunyuan_image3.family.load", fail)
    ran = run_cli("generate", write_manifest(PICTURE), "--device", "cpu")
    assert ran.code == 101, ran.err
    assert "download" not in ran.err
