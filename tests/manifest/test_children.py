"""Several results of one line: their ids, and which of their seeds moves."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest

from hyimg_cli.errors import HyimgError
from hyimg_cli.journal.keys import shaping_fields
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.manifest.resolved import job_to_json, public_line
from hyimg_cli.settings.config import settle
from hyimg_cli.spec.digest import seed_from
from hyimg_cli.spec.job import ImageJob, Job


def resolved(
    card_of: Any, *lines: dict[str, Any], **flags: Any
) -> tuple[list[Job], list[HyimgError]]:
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    manifest = read_manifest("-", io.StringIO(text))
    assert not manifest.faults
    return resolve_jobs(manifest, settle(flags, {}, {}), card_of)


def seeds(card_of: Any, line: dict[str, Any], **flags: Any) -> list[tuple[int, int]]:
    """Of each job the picture's seed and the text's."""
    jobs, faults = resolved(card_of, {"custom_id": "cat", "prompt": "a cat", **line}, **flags)
    assert not faults
    assert all(isinstance(job, ImageJob) for job in jobs)
    return [(job.seed, job.ar_seed) for job in jobs if isinstance(job, ImageJob)]


@pytest.mark.parametrize(
    ("line", "vary", "expected"),
    [
        ({"seed": 5}, "both", [(5, 5), (6, 6), (7, 7)]),
        ({"seed": 5}, "picture", [(5, 5), (6, 5), (7, 5)]),
        ({"seed": 5}, "text", [(5, 5), (5, 6), (5, 7)]),
        ({"seed": 5, "ar_seed": 40}, "both", [(5, 40), (6, 40), (7, 40)]),
        ({"seed": 5, "ar_seed": 40}, "picture", [(5, 40), (6, 40), (7, 40)]),
        ({"seed": 5, "ar_seed": 40}, "text", [(5, 40), (5, 41), (5, 42)]),
        ({"seeds": [3, 1, 2]}, "both", [(3, 3), (1, 1), (2, 2)]),
        ({"seeds": [3, 1, 2]}, "picture", [(3, 3), (1, 3), (2, 3)]),
        ({"seeds": [3, 1, 2]}, "text", [(3, 3), (3, 1), (3, 2)]),
    ],
)
def test_which_seed_moves(
    card_of: Any, line: dict[str, Any], vary: str, expected: list[tuple[int, int]]
) -> None:
    more = {} if "seeds" in line else {"n": 3}
    assert seeds(card_of, line | more | {"vary": vary}) == expected
    assert seeds(card_of, line | more, vary=vary) == expected
    if more:
        assert seeds(card_of, line, vary=vary, n=3) == expected
    if vary == "both":
        assert seeds(card_of, line | more) == expected


def test_seeds_made_from_ids_move_as_well(card_of: Any) -> None:
    first, second = seed_from("cat-0"), seed_from("cat-1")
    assert seeds(card_of, {}, n=2) == [(first, first), (second, second)]
    assert seeds(card_of, {}, n=2, vary="picture") == [(first, first), (second, first)]
    assert seeds(card_of, {}, n=2, vary="text") == [(first, first), (first, second)]


def test_a_line_says_its_own_number(card_of: Any) -> None:
    assert len(seeds(card_of, {"n": 2}, n=5)) == 2
    assert len(seeds(card_of, {"seeds": [4, 9, 1]}, n=5)) == 3
    assert len(seeds(card_of, {"n": 1}, n=5)) == 1


@pytest.mark.parametrize(
    ("line", "flags", "where", "code"),
    [
        ({"vary": "picture"}, {}, "stdin:1: vary", "manifest.unconsumed"),
        ({"n": 2, "bot_task": "none"}, {"vary": "text"}, "flag: vary", "manifest.vary"),
        ({"n": 2, "vary": "text", "temperature": 0}, {}, "stdin:1: vary", "manifest.vary"),
        ({"vary": "text", "cot_text": "a"}, {"n": 2}, "stdin:1: vary", "manifest.vary"),
    ],
)
def test_equal_pictures_are_refused(
    card_of: Any, line: dict[str, Any], flags: dict[str, Any], where: str, code: str
) -> None:
    jobs, (fault,) = resolved(card_of, {"custom_id": "cat", "prompt": "a cat"} | line, **flags)
    assert (fault.where, fault.code, jobs) == (where, code, [])


def test_ids_that_only_a_flag_makes_clash_are_told(card_of: Any) -> None:
    long = "x" * 127
    lines = [
        {"custom_id": "cat", "prompt": "a cat"},
        {"custom_id": "CAT-1", "prompt": "a cat", "n": 1},
        {"custom_id": long, "prompt": "a cat"},
    ]
    jobs, faults = resolved(card_of, *lines, n=2)
    assert [job.custom_id for job in jobs] == ["cat-0", "cat-1"]
    told = [(fault.where, fault.code) for fault in faults]
    assert told[0] == ("stdin:2", "manifest.duplicate-id")
    assert set(told[1:]) == {("stdin:3: custom_id", "manifest.bad-id")}
    assert not resolved(card_of, *lines)[1]


def test_candidates_are_known_by_their_line_and_lines_of_their_own_are_none(card_of: Any) -> None:
    cat, alone = {"custom_id": "cat", "prompt": "a cat"}, {"custom_id": "dog-0", "prompt": "a dog"}
    four, _ = resolved(card_of, {**cat, "n": 4}, alone)
    assert [job.lineage.to_json() for job in four[2:]] == [
        {"candidate_of": "cat", "candidate": 2},
        {"candidate_of": "cat", "candidate": 3},
        {},
    ]
    # Twice as many are these and others.
    eight, _ = resolved(card_of, {**cat, "n": 8})
    assert eight[:4] == [replace(job, user_fields=eight[0].user_fields) for job in four[:4]]


def test_a_candidate_read_back_is_one_result_whatever_n_is(card_of: Any) -> None:
    jobs, _ = resolved(card_of, {"custom_id": "cat", "prompt": "a cat", "n": 2})
    again, faults = resolved(card_of, *map(job_to_json, jobs), n=8)
    assert not faults
    assert [job_to_json(job) for job in again] == [job_to_json(job) for job in jobs]
    draft = replace(jobs[1], lineage=replace(jobs[1].lineage, draft_of="cat-1"))
    ((back,), _) = resolved(card_of, job_to_json(draft))
    assert back.lineage == draft.lineage
    # What it is a candidate for changes neither its pixels nor its file.
    assert shaping_fields(job_to_json(draft)) == shaping_fields(job_to_json(jobs[1]))
    assert not set(public_line(draft)) & {"candidate_of", "candidate", "draft_of"}


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({"candidate_of": "cat", "candidate": 0, "n": 2}, "n"),
        ({"candidate_of": "cat", "candidate": 0, "seeds": [1]}, "seeds"),
        ({"candidate": 0}, "candidate"),
    ],
)
def test_a_candidate_is_one_result_of_a_line(line: dict[str, Any], field: str) -> None:
    text = json.dumps({"custom_id": "cat-0", "prompt": "a cat", **line})
    (fault,) = read_manifest("-", io.StringIO(text)).faults
    assert (fault.code, fault.where.rpartition(": ")[2]) == ("manifest.conflict", field)
