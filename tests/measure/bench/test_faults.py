"""The bench finds each planted fault, and flags no clean run."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measure.bench import faults

from hyimg_cli.kv.tree import KVTree
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.measure.bench import harness, record
from hyimg_cli.measure.bench.scenario import Scenario, read_scenario
from hyimg_cli.measure.bench.verdict import Findings
from hyimg_cli.media.images import size_of
from hyimg_cli.quality.metrics import PIXEL_METRICS

Bench = Callable[..., Findings]

IN_PICTURES = [
    faults.hide_three_specials,
    faults.drop_source_image,
    faults.empty_source_image,
    faults.shift_negative_branch,
    faults.one_step_less,
    faults.other_noise,
    faults.rounded_hand_off,
    faults.one_token_negative,
    faults.pad_negative_branch,
]
# One that hides and one that rounds; `make test-all` plants the others too.
QUICK = (faults.hide_three_specials, faults.rounded_hand_off)


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(one, marks=[] if one in QUICK else [pytest.mark.thorough])
        for one in IN_PICTURES
    ],
)
def test_a_fault_in_the_pictures_differs(
    bench: Bench, small: Scenario, monkeypatch: pytest.MonkeyPatch, plant: faults.Plant
) -> None:
    plant(monkeypatch)
    found = bench(replace(small, repeats=2))
    assert (found.verdict.name, found.verdict.exit_code) == ("differs", 1)
    assert "dB apart, where the plain variant repeats itself exactly" in found.verdict.reasons[0]


@pytest.mark.thorough
@pytest.mark.usefixtures("processor_clock")
@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (faults.sleep_in_recompute, ("recompute once waits", "kv_handoff", "a sleep or a timeout")),
        (faults.sleep_in_decoding, ("recompute once is 0.", "slower in decode_latents", "waits")),
    ],
)
def test_a_gain_that_is_a_sleep_is_not_explained(
    bench: Bench,
    small: Scenario,
    monkeypatch: pytest.MonkeyPatch,
    plant: faults.Plant,
    words: tuple[str, ...],
) -> None:
    plant(monkeypatch)
    found = bench(replace(small, repeats=5))
    assert found.verdict.name == "not explained"
    assert found.verdict.exit_code == 1
    text = " ".join(found.verdict.reasons)
    for word in words:
        assert word in text, text
    assert found.worst.pairs[2].is_identical, "the pictures know nothing of a sleep"


def test_values_that_are_no_numbers_differ_and_are_written(
    bench: Bench, small: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.broken_hand_off(monkeypatch)
    found = bench(replace(small, repeats=2))
    assert found.verdict.name == "differs"
    assert "reuse fails" in " ".join(found.verdict.reasons)
    entry = record.write(found, command="", lpips="", flags={})
    assert json.loads((found.kept / "bench.json").read_text()) == entry


def test_a_variant_that_does_what_the_other_does_compares_nothing(
    bench: Bench, small: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.silent_recompute(monkeypatch)
    found = bench(replace(small, repeats=2))
    assert found.verdict.name == "not explained"
    assert "both variants did the same work for edit" in " ".join(found.verdict.reasons)


@pytest.mark.thorough
def test_a_source_that_is_left_out_of_a_prefixs_key_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scenario's own jobs, two of each source, in turn: a prefix is kept for a later job.

    The sources are of one shape, so that nothing else tells them apart.
    """
    scenario = replace(read_scenario("prefix-sharing"), steps=(1,), main_steps=1, repeats=1)
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for text in scenario.manifest.read_text().splitlines():
        entry = json.loads(text)
        (image,) = entry["images"]
        path = str(scenario.manifest.parent / image)
        by_source[path].append(entry | {"images": [path], "bot_task": "recaption"})
    assert len(by_source) == 2
    assert len(set(map(size_of, by_source))) == 1
    in_turn = [entry for pair in zip(*by_source.values(), strict=False) for entry in pair][:4]
    lines = "".join(f"{json.dumps(entry)}\n" for entry in in_turn)
    assert bench(scenario, lines).verdict.name in ("identical", "equal")
    faults.forget_source_in_key(monkeypatch)
    # A run drops the prefix of a source after its last job; a server keeps it, and would be wrong.
    monkeypatch.setattr(KVTree, "trim", lambda *_: None)
    assert bench(scenario, lines).verdict.name == "differs"


SPOILED = [
    (variant, change)
    for variant in read_scenario("kv-reuse").labels
    for change in (faults.stale_cache, faults.shifted_position, faults.wrong_branch)
]


@pytest.mark.parametrize(
    ("variant", "change"),
    # Each variant and each fault once in the quick ones.
    [
        pytest.param(*one, marks=[] if number % 4 == 0 else [pytest.mark.thorough])
        for number, one in enumerate(SPOILED)
    ],
)
def test_a_spoiled_prefix_of_one_variant_differs_from_both_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, variant: str, change: Any
) -> None:
    faults.spoil_prefixes(monkeypatch, variant, change)
    found = bench(replace(read_scenario("kv-reuse"), steps=(2,), main_steps=2, repeats=1))
    assert found.verdict.name == "differs"
    assert [variant in one.scenario.labels for one in found.comparisons] == [
        one.verdict.name == "differs" for one in found.comparisons
    ]


def jobs_of(scenario: Scenario, count: int) -> str:
    """The first lines of a scenario's own manifest, from any folder."""
    lines = [json.loads(line) for line in scenario.manifest.read_text().splitlines()[:count]]
    folder = scenario.manifest.parent
    return "".join(
        f"{json.dumps(one | {'images': [str(folder / path) for path in one['images']]})}\n"
        for one in lines
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "plant",
    [
        None,
        faults.one_guidance_for_a_batch,
        faults.one_source_for_a_batch,
    ],
)
def test_a_batch_that_draws_with_the_first_jobs_settings_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, plant: faults.Plant | None
) -> None:
    scenario = replace(read_scenario("batching"), steps=(3,), main_steps=3, repeats=1)
    if plant is not None:
        plant(monkeypatch)
    found = bench(scenario, jobs_of(scenario, 4))
    assert found.verdict.name in (("differs",) if plant else ("identical", "equal"))
    assert {job.num_inference_steps for job in found.jobs} == {20}, "steps are the bench's own"
    assert max(one.batch["denoise"] for one in found.worst.timed[0].a[0].outcomes) > 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "plant",
    [
        None,
        faults.keep_generator_of_a_seed,
        faults.add_seed_of_last_job,
    ],
)
def test_a_seed_that_leaks_from_job_to_job_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, plant: faults.Plant | None
) -> None:
    scenario = replace(read_scenario("persistent"), steps=(1,), main_steps=1, repeats=1)
    scenario = replace(scenario, common={**scenario.common, "prewarm": False})
    faults.simulate_processes(monkeypatch)
    if plant is not None:
        plant(monkeypatch)
    found = bench(scenario, jobs_of(scenario, 3))
    assert found.verdict.name in (("differs",) if plant else ("identical", "equal"))


@pytest.mark.parametrize(
    "plant", [pytest.param(None, marks=pytest.mark.thorough), faults.key_source_by_size]
)
def test_a_source_that_is_taken_for_another_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, plant: faults.Plant | None
) -> None:
    """By a process for each job: only there is no cache of encoded sources shared."""
    scenario = replace(read_scenario("persistent"), steps=(1,), main_steps=1, repeats=1)
    scenario = replace(scenario, common={**scenario.common, "prewarm": False})
    lines = [json.loads(line) for line in jobs_of(scenario, 2).splitlines()]
    assert len({size_of(image) for line in lines for image in line["images"]}) == 1
    assert lines[0]["images"] != lines[1]["images"]
    faults.simulate_processes(monkeypatch)
    if plant is not None:
        plant(monkeypatch)
    text = "".join(f"{json.dumps(line | {'bot_task': 'none'})}\n" for line in lines)
    found = bench(scenario, text)
    assert found.verdict.name in (("differs",) if plant else ("identical", "equal"))


@pytest.mark.parametrize(
    "plant", [pytest.param(None, marks=pytest.mark.thorough), faults.key_prompt_by_its_beginning]
)
def test_a_prompt_that_is_taken_for_another_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: faults.Plant | None
) -> None:
    scenario = replace(read_scenario("prompt-cache"), steps=(1,), main_steps=1, repeats=1)
    small = {"n": 1, "size": "32x32", "seed": 1}
    lines = [json.loads(line) | small for line in scenario.manifest.read_text().splitlines()]
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if plant is not None:
        plant(monkeypatch)
    found = harness.Bench(
        scenario,
        read_manifest(jobs),
        {"device": "cpu", "video_model": "tiny-video"},
        folder=tmp_path / "out",
        metrics=tuple(PIXEL_METRICS.values()),
        tell=lambda text: None,
    ).run()
    assert found.verdict.name == ("differs" if plant else "identical")


@pytest.mark.thorough
@pytest.mark.usefixtures("processor_clock")
def test_clean_comparisons_are_not_flagged(bench: Bench, small: Scenario) -> None:
    """Twice five runs a side; what does not come from the clock is the same in all."""
    found = bench(replace(small, steps=(1,), main_steps=1, repeats=10))
    (compared,) = found.comparisons
    (timed,) = compared.timed
    verdicts = [found.verdict]
    for start in range(0, 10, 5):
        five = slice(start, start + 5)
        part = replace(timed, a=timed.a[five], b=timed.b[five])
        verdicts.append(replace(compared, timed=[part]).verdict)
    assert {one.name for one in verdicts} <= {"identical", "equal"}, verdicts
    assert {one.exit_code for one in verdicts} == {0}
