"""A matrix makes the jobs that its combinations are when they are written out."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.manifest.manifest import Manifest, failed_lines, manifest_of
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.settings.config import Setting
from hyimg_cli.spec.card import ModelCard


def read(*lines: dict[str, Any]) -> Manifest:
    return manifest_of("".join(json.dumps(line) + "\n" for line in lines).encode(), "jobs")


def found(**fields: Any) -> list[tuple[str, str]]:
    manifest = read({"prompt": "x"} | fields)
    assert not manifest.lines
    return [(one.code.removeprefix("manifest."), one.where) for one in manifest.faults]


def ids(**fields: Any) -> list[str]:
    manifest = read({"custom_id": "cat", "prompt": "x"} | fields)
    assert not manifest.faults, [str(one) for one in manifest.faults]
    return [line.fields["custom_id"] for line in manifest.lines]


def test_every_combination_is_a_job_with_a_name() -> None:
    assert ids(matrix={"guidance_scale": [2.5, 5.0], "seed": [1, 2]}) == [
        "cat-guidance_scale-2.5-seed-1",
        "cat-guidance_scale-2.5-seed-2",
        "cat-guidance_scale-5-seed-1",
        "cat-guidance_scale-5-seed-2",
    ]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from([1.5, 2, 7.25]), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(["none", "think"]), min_size=1, max_size=2, unique=True),
)
def test_the_jobs_are_those_of_the_lines_written_out(
    seeds: list[int], scales: list[float], tasks: list[str]
) -> None:
    manifest = read(
        {"prompt": "x", "matrix": {"seed": seeds, "guidance_scale": scales, "bot_task": tasks}}
    )
    assert not manifest.faults
    wanted = [
        {"prompt": "x", "seed": seed, "guidance_scale": scale, "bot_task": task}
        for seed, scale, task in itertools.product(seeds, scales, tasks)
    ]
    for line, alone in zip(manifest.lines, read(*wanted).lines, strict=True):
        assert line.fields | {"custom_id": ""} == alone.fields | {"custom_id": ""}
        assert line.given == alone.given


def test_values_that_no_id_can_hold_have_a_digest() -> None:
    square, wide = ids(matrix={"size": ["1:1", "16:9"]})
    assert square.startswith("cat-size-1-1-")
    assert square != wide
    one, other = ids(matrix={"system_prompt": ["be kind", "be brief"]})
    assert one.startswith("cat-system_prompt-be-kind-")
    assert other.startswith("cat-system_prompt-be-brief-")


def test_n_and_seeds_apply_to_each_job(
    settings: dict[str, Setting], card_of: Callable[[str], ModelCard]
) -> None:
    manifest = read(
        {"custom_id": "a", "prompt": "x", "n": 2, "matrix": {"steps": [1, 2]}},
        {"custom_id": "b", "prompt": "x", "seeds": [5, 6], "matrix": {"steps": [3]}},
    )
    jobs, faults = resolve_jobs(manifest, settings, card_of)
    assert not faults
    assert [(job.custom_id, job.num_inference_steps) for job in jobs] == [
        ("a-num_inference_steps-1-0", 1),
        ("a-num_inference_steps-1-1", 1),
        ("a-num_inference_steps-2-0", 2),
        ("a-num_inference_steps-2-1", 2),
        ("b-num_inference_steps-3-0", 3),
        ("b-num_inference_steps-3-1", 3),
    ]


@pytest.mark.parametrize(
    "matrix", [{"seed": list(range(1001))}, {"seed": [*range(40)], "steps": [*range(1, 41)]}]
)
def test_a_matrix_makes_a_thousand_jobs_at_most(matrix: dict[str, Any]) -> None:
    assert found(matrix=matrix) == [("out-of-range", "jobs:1: matrix")]


def test_a_name_that_is_taken_is_told_once() -> None:
    line = {"custom_id": "a", "prompt": "x", "matrix": {"seed": [1, 2, 3]}}
    manifest = read(line, line, {"prompt": "x", "custom_id": "a"})
    assert [one.where for one in manifest.faults] == ["jobs:2 (seed=1)"]
    assert manifest.bad_ids == {2: "jobs-line-2"}


def test_a_job_that_its_model_refuses_is_recorded_by_its_own_name(
    settings: dict[str, Setting], card_of: Callable[[str], ModelCard]
) -> None:
    settings = settings | {"bot_task": Setting("bot_task", "none", "flag")}
    manifest = read({"custom_id": "a", "prompt": "x", "matrix": {"top_k": [1, 2]}})
    jobs, faults = resolve_jobs(manifest, settings, card_of)
    assert not jobs
    assert failed_lines(manifest, faults).keys() == {"a-top_k-1", "a-top_k-2"}


def test_a_faulty_matrix_line_is_recorded_as_one() -> None:
    manifest = read({"custom_id": "a", "prompt": "x", "matrix": {"temperature": [0], "top_k": [1]}})
    assert failed_lines(manifest, manifest.faults).keys() == {"jobs-line-1"}
