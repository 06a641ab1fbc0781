"""Lines that ask for a text: their jobs, and what they cannot have."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.engine import runner
from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.manifest.resolved import job_to_json
from hyimg_cli.settings.config import settle
from hyimg_cli.spec.job import TextJob

CHECKPOINT = Path(__file__).parents[1] / "parity" / "tiny" / "checkpoint"


def examined(*lines: dict[str, Any], **flags: Any) -> tuple[list[TextJob], list[HyimgError]]:
    data = "\n".join(map(json.dumps, lines)).encode()
    jobs, faults = runner.examine(manifest_of(data, "jobs.jsonl"), settle(flags, {}, {}))
    assert all(isinstance(job, TextJob) for job in jobs)
    return jobs, faults  # type: ignore[return-value]


def line(**more: Any) -> dict[str, Any]:
    return {"custom_id": "q", "task": "t2t", "prompt": "Name a colour"} | more


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"choices": ["yes", "no"]},
        {"bot_task": "think", "max_new_tokens": 9, "name": "a/{custom_id}"},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "ar_seed": 3, "metadata": {"a": 1}},
        {"system_prompt": "Be brief.", "images": ["a.png"], "task": "i2t", "x_b": 2},
    ],
)
def test_a_resolved_job_read_again_is_the_same_job(more: dict[str, Any]) -> None:
    (job,), faults = examined(line(**more))
    assert not faults
    entry = json.loads(json.dumps(job_to_json(job)))
    (again,), faults = examined(entry)
    assert not faults
    skipped = {"user_fields", "source_line", "seed", "ar_seed"}
    both = [
        {name: getattr(one, name) for name in TextJob.__dataclass_fields__ if name not in skipped}
        for one in (job, again)
    ]
    assert both[0] == both[1]
    assert (job.ar_seed == again.ar_seed) or not job.text.temperature


@pytest.mark.parametrize(
    ("more", "code", "field"),
    [
        ({"size": "64x64"}, "manifest.foreign-field", "size"),
        ({"num_inference_steps": 4}, "manifest.foreign-field", "num_inference_steps"),
        ({"cot_text": "x"}, "manifest.foreign-field", "cot_text"),
        ({"images": ["a.png"]}, "manifest.conflict", "images"),
        ({"task": "i2t"}, "manifest.missing-field", "images"),
        ({"top_p": 0.5}, "manifest.unconsumed", "top_p"),
        ({"n": 2}, "manifest.unconsumed", "n"),
        ({"choices": ["a", "b"], "max_new_tokens": 4}, "manifest.unconsumed", "max_new_tokens"),
        ({"choices": ["a"]}, "manifest.out-of-range", "choices"),
        ({"choices": ["a", " a"]}, "manifest.out-of-range", "choices"),
        ({"choices": "a"}, "manifest.wrong-type", "choices"),
        ({"bot_task": "recaption"}, "manifest.conflict", "bot_task"),
        ({"bot_task": "think", "choices": ["a", "b"]}, "manifest.conflict", "bot_task"),
        ({"use_system_prompt": "en_vanilla"}, "manifest.conflict", "use_system_prompt"),
        ({"use_system_prompt": "custom"}, "manifest.missing-field", "use_system_prompt"),
        ({"task": "t2i", "choices": ["a", "b"]}, "manifest.foreign-field", "choices"),
    ],
)
def test_a_fault_names_its_field(more: dict[str, Any], code: str, field: str) -> None:
    _, faults = examined(line(**more))
    assert [(one.code, one.where.rpartition(": ")[2]) for one in faults] == [(code, field)]
    assert faults[0].hint


def test_settings_for_pictures_leave_answers_alone() -> None:
    (job,), faults = examined(line(), num_inference_steps=9, bot_task="recaption", temperature=0.9)
    assert not faults
    assert (job.num_inference_steps, job.bot_task, job.text.temperature) == (0, "none", 0.0)


def test_a_control_token_is_refused_in_question_and_choice() -> None:
    for more in ({"prompt": "a <boi> b"}, {"choices": ["<boi>", "no"]}):
        _, faults = examined(line(model=str(CHECKPOINT), **more))
        assert [one.code for one in faults] == ["manifest.control-token"], more
