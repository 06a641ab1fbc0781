"""The tree drawn in errors.py's docstring is the tree of its classes, exit codes included."""

import inspect
import re
import signal
import sys
from pathlib import Path

import pytest

from hyimg_cli import errors

LINE = re.compile(r"^(?P<branch>[\s│├└─]*)(?P<name>[A-Z]\w+)\s+exit (?P<code>\d+)\s")
CLASSES = {
    name: cls
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.HyimgError)
}


def drawn_tree() -> dict[str, tuple[str, int]]:
    """Name to (parent, exit code), as the docstring draws it."""
    tree: dict[str, tuple[str, int]] = {}
    open_names: list[tuple[int, str]] = [(-1, "Exception")]
    for line in (errors.__doc__ or "").splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        depth = match.start("name")
        while open_names[-1][0] >= depth:
            open_names.pop()
        tree[match["name"]] = (open_names[-1][1], int(match["code"]))
        open_names.append((depth, match["name"]))
    return tree


def test_the_drawing_is_the_code() -> None:
    in_code = {name: (cls.__bases__[0].__name__, cls.exit_code) for name, cls in CLASSES.items()}
    assert drawn_tree() == in_code


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_each_class_says_what_it_means(name: str) -> None:
    assert (CLASSES[name].__doc__ or "").strip()


def test_default_codes_are_distinct() -> None:
    codes = [cls.default_code for cls in CLASSES.values()]
    assert len(set(codes)) == len(codes)


def test_what_where_and_hint_reach_the_text() -> None:
    error = errors.UsageError("bad value 7", where="jobs.jsonl:3", hint="use 1 to 5", code="a.b")
    assert str(error) == "jobs.jsonl:3: bad value 7 (use 1 to 5)"
    assert error.code == "a.b"
    assert not error.retryable


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (Path("s3://bucket/run"), "s3://bucket/run"),  # the path has lost a slash
        (Path("/data/s3:/run"), "/data/s3:/run"),
        (Path("runs/night"), "runs/night"),
        ("s3:/bucket: a text stays as it is", "s3:/bucket: a text stays as it is"),
    ],
)
def test_a_place_is_shown_as_its_user_named_it(place: Path | str, where: str) -> None:
    assert errors.HyimgError("gone", where=place).where == where


def test_manifest_errors_keep_every_fault() -> None:
    faults = [errors.UsageError("one"), errors.UsageError("two")]
    error = errors.ManifestError(faults)
    assert error.faults == tuple(faults)
    assert error.what.startswith("2 faults")
    assert errors.ManifestError(faults[:1]).what.startswith("1 fault ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_exits_as_shells_expect(number: signal.Signals, code: int) -> None:
    assert errors.Interrupted(number).exit_code == code


@pytest.mark.parametrize(
    ("recorded", "hint"),
    [
        (
            '{"url": "file:///home/me/hyimg%20cli", "dir_info": {}}',
            "pip install '/home/me/hyimg cli[s3]'",
        ),
        ('{"url": "https://example.org/hyimg.whl"}', "pip install 'hyimg-cli[s3]'"),
        (None, "pip install 'hyimg-cli[s3]'"),
    ],
)
def test_an_extra_comes_from_where_hyimg_was_installed_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: str | None, hint: str
) -> None:
    place = tmp_path / "hyimg_cli-1.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: hyimg-cli\nVersion: 1\n")
    if recorded:
        (place / "direct_url.json").write_text(recorded)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert errors.installation("s3") == hint
