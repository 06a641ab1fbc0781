"""Scenarios: every one of the package is whole, and a faulty one says what is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from hyimg_cli.errors import UsageError
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.measure.bench import scenario

GOOD = """
question = "Which?"
manifest = "jobs.jsonl"
phases = ["prefill"]
steps = [4, 2]
[common]
batching_max_size = 1
[a]
label = "one"
[b]
label = "other"
kv_reuse = false
lifetime = "process"
"""


@pytest.mark.parametrize("name", scenario.names())
def test_every_scenario_of_the_package_is_whole(name: str) -> None:
    found = scenario.read_scenario(name)
    manifest = read_manifest(found.manifest)
    assert manifest.lines
    assert not manifest.faults
    assert found.main_steps in found.steps
    assert len(set(found.labels)) == len(found.variants) >= 2
    for pair in found.pairs:
        one, other = (replace(variant, label="", phases=()) for variant in pair.variants)
        assert one != other


def test_a_scenario_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    found = scenario.read_scenario(str(path))
    assert (found.name, found.main_steps, found.repeats) == ("mine", 2, 5)
    assert found.manifest == tmp_path / "jobs.jsonl"
    assert found.variants[1] == scenario.Variant("other", {"kv_reuse": False}, "process")
    assert found.may_gain_in("prefill")
    assert not found.may_gain_in("think")


def test_three_variants_are_three_pairs_each_with_the_phases_of_its_plainer_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'{GOOD}[c]\nlabel = "third"\nphases = ["think"]\n')
    pairs = scenario.read_scenario(str(path)).pairs
    assert [one.title for one in pairs] == ["one vs other", "one vs third", "other vs third"]
    assert [one.phases for one in pairs] == [("prefill",), ("think",), ("think",)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("question = ", "not valid TOML"),
        ("question = 'x'", "it needs two variants"),
        (GOOD.split("[b]")[0], "it needs two variants"),
        (GOOD.replace("question", "# question"), "question: Field required"),
        (GOOD.replace("steps", "stepps"), "stepps: Unexpected"),
        (GOOD.replace("kv_reuse", "kv_reus"), "[b] kv_reus is not a setting"),
        (
            GOOD.replace('"process"', '"day"'),
            "b.lifetime: Input should be 'session', 'process'",
        ),
        (GOOD.replace('"one"', '"other"'), "two variants have the same label"),
        (GOOD.replace('label = "one"', ""), "a.label: Field required"),
        (GOOD.replace("[4, 2]", "[4, 'two']"), "steps.1: Input should be a valid integer"),
        (GOOD.replace("[4, 2]", "[4, 0]"), "steps.1: Input should be greater than or equal to 1"),
        (GOOD.replace("[4, 2]", "[]"), "steps: Tuple should have at least 1 item"),
        (f"repeats = 0\n{GOOD}", "repeats: Input should be greater than or equal to 1"),
        (GOOD.replace('["prefill"]', '["prefil"]'), "unknown phase 'prefil'"),
        (GOOD.replace("[a]", "[[a]]"), "a: Input should be a dictionary"),
        (
            GOOD + 'keeps_kv = false\n[c]\nlabel = "c"\nphases = ["prefil"]',
            "unknown phase 'prefil'",
        ),
        (
            GOOD + '[c]\nlabel = "c"\nkeeps_kv = false',
            "[c] keeps_kv = false needs kv_reuse = false",
        ),
        (f"least_psnr = 30.0\n{GOOD}[c]\nlabel = 'c'", "least_psnr needs exactly two variants"),
        (GOOD.replace("= false", "= 'no'"), '[b] kv_reuse: "no" is not true or false'),
        (GOOD.replace("batching_max_size = 1", "replicas = 2"), "[common] replicas"),
    ],
)
def test_faults_of_a_scenario(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        scenario.read_scenario(str(path))
    assert what in caught.value.what
    assert caught.value.where == "mine.toml"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        scenario.read_scenario("kv-resue")
    assert caught.value.hint == "did you mean kv-reuse?"
