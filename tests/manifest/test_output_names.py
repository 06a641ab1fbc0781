"""The names of a manifest's files: filled from each line, and reported if two collide."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.engine.runner import examine
from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.output_names import path_of
from hyimg_cli.manifest.resolved import job_to_json
from hyimg_cli.settings.config import settle
from hyimg_cli.spec.job import Job

WriteManifest = Callable[..., Path]
Examined = Callable[..., tuple[list[Job], list[HyimgError]]]
A = {"prompt": "a cat"}
FILM = {"prompt": "a cat", "task": "t2v", "size": "64x32"}


@pytest.fixture
def examined(write_manifest: WriteManifest) -> Examined:
    """Jobs and faults of lines under a name."""

    def run(
        *lines: Mapping[str, Any] | str, name: str | None = None, **settings: Any
    ) -> tuple[list[Job], list[HyimgError]]:
        return examine(
            read_manifest(write_manifest(*lines)), settle({"name": name, **settings}, {}, {})
        )

    return run


def paths(jobs: list[Job]) -> list[str]:
    return [path_of(job) for job in jobs]


def told(faults: list[HyimgError]) -> list[tuple[str, str]]:
    return [(fault.where, fault.what) for fault in faults]


def test_by_default_a_file_has_the_id_of_its_job(examined: Examined) -> None:
    jobs, faults = examined(A | {"id": "a/b", "n": 2}, FILM | {"id": "c"}, A)
    assert not faults
    assert paths(jobs) == ["a/b-0.png", "a/b-1.png", "c.mp4", "jobs-0003.png"]
    assert not any("name" in job_to_json(job) for job in jobs)


def test_every_field(examined: Examined, tmp_path: Path) -> None:
    template = "{folder}/{stem}_{custom_id}_{seed}_{index:03}"
    jobs, faults = examined(
        A | {"id": "a", "images": ["in/deep/Foto ä (1).jpg", "other.png"], "seed": 5},
        A | {"id": "b", "seeds": [8, 9]},
        FILM | {"id": "c", "seed": 1},
        A | {"id": "d", "images": "d.png", "seed": 6},
        name=template,
    )
    assert not faults
    assert paths(jobs) == [
        "in/deep/Foto ä (1)_a_5_001.png",
        "b-0_b-0_8_002.png",
        "b-1_b-1_9_003.png",
        "c_c_1_004.mp4",
        "d_d_6_005.png",
    ]


@pytest.mark.parametrize(
    ("image", "folder"),
    [
        ("a.png", ""),
        ("./a.png", ""),
        ("in/a.png", "in"),
        ("in/../a.png", ""),
        ("in/x/../y/a.png", "in/y"),
        ("../a.png", "{above}"),
        ("../../else/where/a.png", "where"),
        ("/abs/o:lute/a.png", "o_lute"),
        ("/a.png", ""),
        (".hidden/..dots./a.png", "hidden/dots"),
    ],
)
def test_the_folder_of_a_source_is_below_the_outputs(
    examined: Examined, tmp_path: Path, image: str, folder: str
) -> None:
    ((job,), faults) = examined(A | {"images": image}, name="{folder}/{stem}")
    assert not faults
    above = tmp_path.parent.name
    expected = folder.replace("{above}", above)
    assert path_of(job) == f"{expected}/a.png".removeprefix("/")


def test_a_line_and_a_resolved_line_say_a_name(examined: Examined) -> None:
    lines = (A | {"id": "a", "name": "{custom_id}-x"}, A | {"id": "b", "images": "x{y}.png"})
    jobs, faults = examined(*lines, name="{stem}-{index}")
    assert not faults
    assert paths(jobs) == ["a-x.png", "x{y}-2.png"]
    again, faults = examined(*map(job_to_json, jobs))
    assert not faults
    assert paths(again) == paths(jobs)
    assert [job_to_json(job)["name"] for job in again] == ["a-x", "x{{y}}-2"]


def test_formats_have_their_suffixes(examined: Examined) -> None:
    jobs, faults = examined(
        A | {"id": "a"},
        A | {"id": "b", "format": "webp"},
        A | {"id": "c", "format": "png"},
        FILM | {"id": "d"},
        format="jpg",
    )
    assert not faults
    assert paths(jobs) == ["a.jpg", "b.webp", "c.png", "d.mp4"]


def test_both_lines_of_a_collision_are_named(examined: Examined) -> None:
    jobs, faults = examined(
        A | {"id": "a", "images": "in/cat.png"},
        A | {"id": "b", "images": "in/dog.png"},
        A | {"id": "c", "images": "in/Cat.png"},
        A | {"id": "d", "images": "in/ca\u0308t.png"},
        A | {"id": "e", "images": "in/c\u00e4t.png"},
        name="{stem}",
    )
    assert [job.custom_id for job in jobs] == ["a", "b", "d"]
    assert told(faults) == [
        ("jobs.jsonl:3: --name", '"Cat.png" may collide with the file of jobs.jsonl:1, "cat.png"'),
        ("jobs.jsonl:5: --name", '"c\u00e4t.png" is also the file of jobs.jsonl:4'),
    ]
    assert faults[0].code == "manifest.duplicate-name"
    assert faults[0].hint == "add {custom_id} or {seed} to the name"


def test_pictures_of_one_line_are_numbered_as_their_ids(examined: Examined) -> None:
    jobs, faults = examined(A | {"id": "a", "n": 3, "name": "same"}, A | {"id": "b"})
    assert [job.custom_id for job in jobs] == ["a-0", "a-1", "a-2", "b"]
    assert paths(jobs)[:3] == ["same-0.png", "same-1.png", "same-2.png"]
    assert not faults


def test_a_name_that_is_none_is_told_with_its_line(examined: Examined) -> None:
    long = "x" * 240
    jobs, faults = examined(
        A | {"id": "a", "images": f"{long}.png"},
        A | {"id": "b", "images": "sub.png/b.png", "name": "{folder}/{stem}"},
        name="{stem}",
    )
    assert not jobs
    assert [where for where, _ in told(faults)] == ["jobs.jsonl:1: --name", "jobs.jsonl:2: name"]
    assert "it is too long" in faults[0].what
    assert "named like a file of a run" in faults[1].what


def test_a_faulty_line_keeps_its_number(examined: Examined) -> None:
    """So that names stay when it is mended."""
    good = [A | {"id": name} for name in "abcd"]
    before, _ = examined(*good, name="{index}")
    for bad in (A | {"id": "b", "sed": 1}, "{", A | {"id": "b", "top_p": 1, "bot_task": "none"}):
        after, faults = examined(good[0], bad, *good[2:], name="{index}")
        assert faults
        assert paths(after) == [path for path in paths(before) if path != "2.png"]


@pytest.mark.parametrize(
    ("line", "settings", "where", "what"),
    [
        ({"quality": 5}, {}, "jobs.jsonl:1: quality", "it has no effect: a PNG has none"),
        ({"quality": 5, "format": "webp", "lossless": True}, {}, "jobs.jsonl:1: quality", "WebP"),
        ({"quality": 5}, {"format": "webp", "lossless": True}, "jobs.jsonl:1: quality", "WebP"),
        ({"lossless": True}, {}, "jobs.jsonl:1: lossless", "PNG is always lossless"),
        (
            {"lossless": True},
            {"format": "jpeg"},
            "jobs.jsonl:1: lossless",
            "JPEG cannot be lossless",
        ),
        ({"format": "jpeg"}, {"lossless": True}, "flag: lossless", "JPEG cannot be lossless"),
        ({"format": "gif"}, {}, "jobs.jsonl:1: format", '"gif" is not known'),
        (FILM | {"format": "webp"}, {}, "jobs.jsonl:1: format", "it is only for it2i and t2i"),
    ],
)
def test_what_a_format_cannot_be(
    examined: Examined, line: dict[str, Any], settings: dict[str, Any], where: str, what: str
) -> None:
    jobs, (fault,) = examined(A | line, **settings)
    assert not jobs
    assert fault.where == where
    assert what in fault.what


@pytest.mark.parametrize(
    ("line", "settings", "written"),
    [
        ({}, {}, {}),
        ({}, {"quality": 7, "lossless": True}, {}),
        ({"format": "jpg"}, {}, {"format": "jpeg", "quality": 95}),
        ({"quality": 7}, {"format": "jpeg"}, {"format": "jpeg", "quality": 7}),
        ({"format": "webp"}, {"quality": 8}, {"format": "webp", "quality": 8}),
        (
            {"format": "webp"},
            {"quality": 8, "lossless": True},
            {"format": "webp", "lossless": True},
        ),
        ({"lossless": True}, {"format": "webp"}, {"format": "webp", "lossless": True}),
    ],
)
def test_only_what_a_file_hangs_on_is_in_its_resolved_line(
    examined: Examined, line: dict[str, Any], settings: dict[str, Any], written: dict[str, Any]
) -> None:
    ((job,), faults) = examined(A | line, **settings)
    assert not faults
    entry = job_to_json(job)
    assert {name: entry[name] for name in ("format", "quality", "lossless") if name in entry} == (
        written
    )
    ((again,), _) = examined(entry)
    assert json.dumps(job_to_json(again)) == json.dumps(entry)
