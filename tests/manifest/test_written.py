"""A line that `hyimg think` wrote, as it is read again: unedited, edited, and edited amiss."""

import io
import json
from typing import Any

import pytest

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.manifest.resolved import job_to_json
from hyimg_cli.manifest.written import Replay, note
from hyimg_cli.settings.config import settle
from hyimg_cli.spec.job import ImageJob

TEXT = "<think>a cat, seen from afar</think><recaption>A cat.</recaption>"
IDS = [5, 9, 2]
FACTS = {
    "key": "k",
    "bot_task": "think_recaption",
    "cut": "",
    "ending": [40, 41],
    "lengths": [1, 2],
    "withdrawn": [7],
}
LINE: dict[str, Any] = {
    "custom_id": "cat",
    "prompt": "a cat",
    "cot_text": TEXT,
    "ratio_index": 3,
    "size": "auto",
    "cot_token_ids": IDS,
    "written": note(IDS, TEXT, FACTS),
}


def read(card_of: Any, line: dict[str, Any], **flags: Any) -> tuple[list[Any], list[HyimgError]]:
    manifest = read_manifest("-", io.StringIO(json.dumps(line) + "\n"))
    jobs, faults = resolve_jobs(manifest, settle(flags, {}, {}), card_of)
    return jobs, [*manifest.faults, *faults]


def job_of(card_of: Any, line: dict[str, Any], **flags: Any) -> ImageJob:
    (job,), faults = read(card_of, line, **flags)
    assert not faults
    assert isinstance(job, ImageJob)
    return job


def test_as_it_was_written_its_own_tokens_count(card_of: Any) -> None:
    job = job_of(card_of, LINE, size="64x256")
    assert (job.cot_token_ids, job.cot_text) == (tuple(IDS), None)
    assert (job.size.width, job.size.height) == (96, 160)  # the card's fourth
    spelled = json.dumps(LINE, ensure_ascii=True).replace("<", "\\u003c")
    assert job_of(card_of, json.loads(spelled)) == job_of(card_of, LINE)


def test_how_it_was_written_is_told_as_long_as_nobody_edited_it(card_of: Any) -> None:
    job = job_of(card_of, LINE)
    replay = Replay.of(job)
    assert replay is not None
    assert replay.job.writes_text
    assert replay.job.bot_task == "think_recaption"
    # One id of the text is the prompt's; the text and its ending follow, and what was taken back.
    assert (replay.fed(1), replay.runs(1)) == ((9, 2), ((9,), (2, 7)))
    again = job_to_json(job)
    assert job_of(card_of, again | {"custom_id": "cat"}).written_json == job.written_json
    edited = job_of(card_of, LINE | {"cot_text": TEXT.replace("A cat.", "A dog.")})
    assert Replay.of(edited) is None
    short = LINE | {"written": LINE["written"] | {"lengths": [9]}}
    replay = Replay.of(job_of(card_of, short))
    assert replay is not None
    assert replay.runs(1) == ()


def test_an_edited_text_is_the_text(card_of: Any) -> None:
    edited = TEXT.replace("A cat.", "A red cat, asleep.")
    job = job_of(card_of, LINE | {"cot_text": edited})
    assert (job.cot_token_ids, job.cot_text) == (None, edited)
    assert (job.size.width, job.size.height) == (96, 160)


def test_either_form_alone_will_do(card_of: Any) -> None:
    without_text = {name: value for name, value in LINE.items() if name != "cot_text"}
    assert job_of(card_of, without_text).cot_token_ids == tuple(IDS)
    without_ids = {name: value for name, value in LINE.items() if name != "cot_token_ids"}
    assert job_of(card_of, without_ids).cot_text == TEXT


def test_another_size_needs_no_ratio(card_of: Any) -> None:
    line = {name: value for name, value in LINE.items() if name != "ratio_index"}
    assert job_of(card_of, line | {"size": "256x64"}).size.width == 256


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (TEXT.replace("</recaption>", ""), "</recaption> is missing"),
        (TEXT.replace("<think>", ""), "<think> is missing"),
        (TEXT.replace("</think>", "</thnik>"), "</think> is missing"),
        ("A cat.", "<think> is missing"),
        (TEXT + "<think>", "<think> appears 2 times"),
        (
            "<recaption>A cat.</recaption><think>a cat</think>",
            "its tags are in another order: <recaption> </recaption> <think> </think>",
        ),
    ],
)
def test_tags_that_no_longer_fit_are_named(card_of: Any, text: str, what: str) -> None:
    jobs, (fault,) = read(card_of, LINE | {"cot_text": text})
    assert (fault.code, fault.where) == ("manifest.written", "stdin:1: cot_text")
    assert fault.what == f"edited: {what}"
    assert "cat" not in [job.custom_id for job in jobs]
    # Without the note any text will do, as ever.
    plain = {name: LINE[name] for name in ("custom_id", "prompt", "ratio_index")}
    assert job_of(card_of, plain | {"cot_text": text}).cot_text == text


def test_a_text_of_odd_tags_may_be_edited_beside_them(card_of: Any) -> None:
    """Sampling may repeat a tag: what counts is what was there."""
    odd = "<think>one <think>two</think><b>"
    line = LINE | {"cot_text": odd, "written": note(IDS, odd, FACTS)}
    edited = odd.replace("two", "2").replace("<b>", "")
    assert job_of(card_of, line | {"cot_text": edited}).cot_text == edited


@pytest.mark.parametrize(
    ("changes", "place", "code"),
    [
        ({"cot_token_ids": [5, 9]}, "cot_token_ids", "written"),
        ({"ratio_index": 77}, "ratio_index", "out-of-range"),
        ({"size": "16:9"}, "ratio_index", "conflict"),
        ({"written": {"by": "me"}}, "written", "written"),
        ({"written": None}, "written", "written"),
        ({"written": LINE["written"] | {"bot_task": "none"}}, "written", "written"),
        ({"written": LINE["written"] | {"lengths": [1, -2]}}, "written", "written"),
        ({"written": LINE["written"] | {"ending": ["x"]}}, "written", "written"),
        ({"cot_text": "  "}, "cot_text", "empty-text"),
        ({"temperature": 0.5}, "temperature", "unconsumed"),
    ],
)
def test_other_slips_are_named(
    card_of: Any, changes: dict[str, Any], place: str, code: str
) -> None:
    _, (fault, *_) = read(card_of, LINE | changes)
    assert (fault.where, fault.code) == (f"stdin:1: {place}", f"manifest.{code}")


def test_a_ratio_that_the_model_lacks_is_named_of_an_edit_that_keeps_its_source(
    card_of: Any, write_picture: Any
) -> None:
    edit = {"images": [str(write_picture())], "keep_outside": True, "ratio_index": 77}
    jobs, (fault,) = read(card_of, LINE | edit)
    assert (jobs, fault.where, fault.code) == ([], "stdin:1: ratio_index", "manifest.out-of-range")


def test_a_line_whose_text_was_taken_out_says_so(card_of: Any) -> None:
    left = {name: value for name, value in LINE.items() if not name.startswith("cot_")}
    _, faults = read(card_of, left)
    assert [(fault.where, fault.code) for fault in faults] == [
        ("stdin:1: ratio_index", "manifest.unconsumed"),
        ("stdin:1: written", "manifest.written"),
    ]


def test_the_task_says_which_prompt_a_dynamic_one_is(card_of: Any) -> None:
    line = {"prompt": "a cat", "cot_text": "a", "use_system_prompt": "dynamic"}
    assert job_of(card_of, line | {"bot_task": "recaption"}).bot_task == "recaption"
    _, (fault,) = read(card_of, line | {"use_system_prompt": "None", "bot_task": "recaption"})
    assert fault.code == "manifest.unconsumed"
