"""The bench names each planted fault, and flags no clean run."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from measure.bench import faults

from hyimg_cli.measure.bench import record
from hyimg_cli.measure.bench.controls import LookedThrough
from hyimg_cli.measure.bench.scenario import Scenario
from hyimg_cli.measure.bench.verdict import Comparison

Bench = Callable[..., Comparison]

NAMED = [
    (faults.hide_three_specials, ("visibility", "hidden from every denoise step", "<boi>")),
    (faults.drop_source_image, ("visibility", "source image 1", "hidden from every")),
    (faults.empty_source_image, ("prefix K/V", "source image 1", "the rows are empty")),
    (faults.shift_negative_branch, ("prefix K/V", "branch 1", "1 slot too late")),
    (faults.one_step_less, ("schedule", "reuse takes 1 steps, recompute 2")),
    (faults.other_noise, ("initial noise",)),
    (faults.rounded_hand_off, ("prefix K/V", "branch 0")),
]
# A fault of each kind: what is hidden, what lies elsewhere, what is not done.
QUICK = (faults.hide_three_specials, faults.shift_negative_branch, faults.one_step_less)


@pytest.mark.parametrize(
    ("plant", "words"),
    [pytest.param(*one, marks=[] if one[0] in QUICK else [pytest.mark.thorough]) for one in NAMED],
    ids=[one.__name__ for one, _ in NAMED],
)
def test_a_fault_in_the_pictures_is_found_where_it_is(
    look_through: Callable[[], LookedThrough],
    monkeypatch: pytest.MonkeyPatch,
    plant: faults.Plant,
    words: tuple[str, ...],
) -> None:
    plant(monkeypatch)
    text = " ".join(str(one) for one in look_through().divergences if one.is_fault)
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(("plant", "words"), NAMED[:1])
def test_a_fault_in_the_pictures_is_named(
    bench: Bench,
    small: Scenario,
    monkeypatch: pytest.MonkeyPatch,
    plant: faults.Plant,
    words: tuple[str, ...],
) -> None:
    plant(monkeypatch)
    found = bench(replace(small, repeats=2))
    assert found.verdict.name == "differs"
    assert found.verdict.exit_code == 1
    text = " ".join(found.verdict.reasons)
    for word in words:
        assert word in text, text


@pytest.mark.thorough
@pytest.mark.usefixtures("processor_clock")
@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (faults.sleep_in_recompute, ("recompute waits", "kv_handoff", "a sleep or a timeout")),
        (faults.sleep_in_decoding, ("recompute is 0.", "slower in decode_latents", "waits")),
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
    assert found.pairs[2].is_identical, "the pictures know nothing of a sleep"


def test_values_that_are_no_numbers_are_named_and_written(
    bench: Bench, small: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.broken_hand_off(monkeypatch)
    found = bench(replace(small, repeats=2))
    assert found.verdict.name == "differs"
    assert any("prefix K/V" in reason for reason in found.verdict.reasons), found.verdict.reasons
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
@pytest.mark.usefixtures("processor_clock")
def test_clean_comparisons_are_not_flagged(bench: Bench, small: Scenario) -> None:
    """Twice five runs a side; what does not come from the clock is the same in all."""
    found = bench(replace(small, steps=(1,), main_steps=1, repeats=10))
    (timed,) = found.timed
    verdicts = [found.verdict]
    for start in range(0, 10, 5):
        five = slice(start, start + 5)
        part = replace(timed, a=timed.a[five], b=timed.b[five])
        verdicts.append(replace(found, timed=[part]).verdict)
    assert {one.name for one in verdicts} <= {"identical", "equal"}, verdicts
    assert {one.exit_code for one in verdicts} == {0}
