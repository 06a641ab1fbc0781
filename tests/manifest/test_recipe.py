"""Precedence: line > flag > environment > recipe > checkpoint; and what lines expand into."""

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.cli.recipe import read_recipe
from hyimg_cli.errors import CheckpointError
from hyimg_cli.manifest.fields import AR_FIELDS
from hyimg_cli.manifest.manifest import Manifest, read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.manifest.resolved import size_text
from hyimg_cli.settings.config import Setting, settle
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.digest import seed_from
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import CHECKPOINT

CardOf = Callable[[str], ModelCard]

# For each setting of the sampling, values for line, flag, environment and recipe, as text.
FOUR = {
    "num_inference_steps": ("11", "12", "13", "14"),
    "guidance_scale": ("1.5", "2.5", "3.5", "4.5"),
    "flow_shift": ("1.5", "2.5", "3.5", "4.5"),
    "seed": ("11", "12", "13", "14"),
    "size": ("64x64", "64x80", "64x96", "16:9"),
    "ar_seed": ("11", "12", "13", "14"),
    "temperature": ("0.1", "0.2", "0.3", "0.4"),
    "top_k": ("11", "12", "13", "14"),
    "top_p": ("0.1", "0.2", "0.3", "0.4"),
    "max_new_tokens": ("11", "12", "13", "14"),
    "bot_task": ("think", "recaption", "none", "think"),
    "use_system_prompt": ("None", "en_vanilla", "dynamic", "en_unified"),
    "drop_think": ("true", "false", "true", "false"),
}


def read(*entries: dict[str, Any]) -> Manifest:
    text = "".join(json.dumps({"prompt": "a cat"} | entry) + "\n" for entry in entries)
    return read_manifest("-", io.StringIO(text))


@pytest.fixture
def resolve(settings: dict[str, Setting], card_of: CardOf) -> Callable[..., list[ImageJob]]:
    def resolved(*entries: dict[str, Any], **flags: Any) -> list[ImageJob]:
        manifest = read(*entries)
        jobs, faults = resolve_jobs(manifest, settle(flags, {}, {}), card_of)
        assert not [str(fault) for fault in (*manifest.faults, *faults)]
        return jobs

    return resolved


def value_in(job: ImageJob, name: str) -> Any:
    return getattr(job.text if name in AR_FIELDS and name != "ar_seed" else job, name)


def json_value(name: str, text: str) -> Any:
    """The text of a value as a manifest or a recipe spells it."""
    if name in ("size", "bot_task", "use_system_prompt"):
        return text
    return json.loads(text)


@pytest.mark.parametrize("name", FOUR)
def test_the_first_source_that_speaks_wins(name: str, card_of: CardOf, tmp_path: Path) -> None:
    texts = FOUR[name]
    values = [json_value(name, text) for text in texts]
    path = tmp_path / "run.toml"
    path.write_text(f"[sampling]\n{name} = {json.dumps(values[3])}\n")
    for speaks in itertools.product([True, False], repeat=4):
        in_line, in_flag, in_environment, in_recipe = speaks
        settings = settle(
            {name: values[1] if in_flag else None},
            {f"HYIMG_{name.upper()}": texts[2]} if in_environment else {},
            read_recipe(path) if in_recipe else {},
        )
        (job,), faults = resolve_jobs(read({name: values[0]} if in_line else {}), settings, card_of)
        assert not faults
        found = size_text(job.size) if name == "size" else value_in(job, name)
        own = getattr(card_of("").defaults, name, "auto")
        winners = (value for value, is_set in zip(values, speaks, strict=True) if is_set)
        is_of_checkpoint = SETTINGS[name].default is CHECKPOINT
        if any(speaks) or is_of_checkpoint or name == "size":
            assert found == next(winners, own), speaks
        unset = "model" if is_of_checkpoint else "default"
        origins = zip(("flag", "environment", "recipe"), speaks[1:], strict=True)
        assert settings[name].origin == next((o for o, is_set in origins if is_set), unset)


def test_every_setting_is_settled_with_its_default(settings: dict[str, Setting]) -> None:
    assert settings.keys() == SETTINGS.keys()
    assert settings["model"] == Setting("model", "tiny-image", "default")
    assert settings["kv_reuse"] == Setting("kv_reuse", True, "default")
    assert settings["size"] == Setting("size", SizeRequest(), "default")
    assert settings["top_k"] == Setting("top_k", None, "model")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("KV_REUSE", "0", False),
        ("KV_REUSE", "Off", False),
        ("METADATA", "yes", True),
        ("MAX_RETRIES", "3", 3),
        ("SIZE", "16:9", SizeRequest(9, 16)),
        ("BOT_TASK", "image", "none"),
        ("TEMPERATURE", "0", 0.0),
        ("OUTPUT_DIR", "out", "out"),
        ("SEED", "", None),
    ],
)
def test_environment_variables_are_typed(name: str, text: str, value: Any) -> None:
    assert settle({}, {f"HYIMG_{name}": text}, {})[name.lower()].value == value


def test_flags_that_are_no_settings_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="sede"):
        settle({"sede": 1}, {}, {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("true", "on"), ("false", "off"), ('"auto"', "auto"), ('"on"', "on"), ('"off"', "off")),
    ],
)
def test_graphs_are_on_off_or_auto(tmp_path: Path, text: str, value: str) -> None:
    """true and false stay what they were."""
    path = tmp_path / "graphs.toml"
    path.write_text(f"[model]\ndecode_graphs = {text}\n")
    settled = settle({}, {}, read_recipe(path))["decode_graphs"]
    assert (settled.value, settled.origin) == (value, "recipe")


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("1", "on"), ("False", "off")])
def test_graphs_by_the_environment(text: str, value: str) -> None:
    assert settle({}, {"HYIMG_DECODE_GRAPHS": text}, {})["decode_graphs"].value == value
    assert settle({}, {}, {})["decode_graphs"].value == "auto"


def test_a_recipe_comes_back_typed_and_flat(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nmodel = "some/model"\ndtype = "bfloat16"\n'
        '[sampling]\nsize = "64x96"\nguidance_scale = 3\n'
        "[reuse]\nkv_reuse = false\n[output]\nmetadata = false\n[failure]\nmax_retries = 2\n"
    )
    assert read_recipe(path) == {
        "model": "some/model",
        "dtype": "bfloat16",
        "size": SizeRequest(height=96, width=64),
        "guidance_scale": 3.0,
        "kv_reuse": False,
        "metadata": False,
        "max_retries": 2,
    }


def test_a_seed_follows_from_the_id_alone(resolve: Callable[..., list[ImageJob]]) -> None:
    one, two = resolve({"custom_id": "a"}, {"custom_id": "b", "n": 2})[:2]
    assert one.seed == seed_from("a")
    assert two.seed == seed_from("b-0")
    assert one.ar_seed == one.seed


def test_children_count_up_from_the_seed(resolve: Callable[..., list[ImageJob]]) -> None:
    jobs = resolve({"custom_id": "a", "n": 3, "seed": 2**63 - 2, "metadata": {"k": 1}, "x_y": 2})
    assert [(job.custom_id, job.seed) for job in jobs] == [
        ("a-0", 2**63 - 2),
        ("a-1", 2**63 - 1),
        ("a-2", 0),
    ]
    assert {job.metadata_json for job in jobs} == {'{"k": 1}'}
    assert {job.extra_json for job in jobs} == {'{"x_y": 2}'}
    assert len({job.source_line for job in jobs}) == 1


def test_seeds_are_taken_as_they_are(resolve: Callable[..., list[ImageJob]]) -> None:
    jobs = resolve(
        {"custom_id": "a", "seeds": [7, 3], "ar_seed": 9}, {"custom_id": "b", "seeds": [5]}
    )
    assert [(job.custom_id, job.seed, job.ar_seed) for job in jobs] == [
        ("a-0", 7, 9),
        ("a-1", 3, 9),
        ("b", 5, 5),
    ]


def test_seeds_of_a_line_outweigh_the_seed_flag(resolve: Callable[..., list[ImageJob]]) -> None:
    assert [job.seed for job in resolve({"seeds": [7, 3]}, seed=1)] == [7, 3]
    assert [job.seed for job in resolve({"n": 2}, seed=5)] == [5, 6]


def test_images_are_found_from_the_manifest(
    tmp_path: Path, settings: dict[str, Setting], card_of: CardOf
) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(json.dumps({"prompt": "a", "images": ["in/cat.png", "/abs/dog.png"]}) + "\n")
    (job,), _ = resolve_jobs(read_manifest(path), settings, card_of)
    assert job.images == (str(tmp_path / "in/cat.png"), "/abs/dog.png")
    (job,), _ = resolve_jobs(read({"images": ["in/cat.png"]}), settings, card_of)
    assert job.images == ("in/cat.png",)


def test_user_fields_are_those_of_the_line(resolve: Callable[..., list[ImageJob]]) -> None:
    (job,) = resolve({"steps": 7, "width": 64, "height": 64}, guidance_scale=2.0)
    assert job.user_fields == {"prompt", "num_inference_steps", "size"}


@pytest.mark.parametrize(
    ("entry", "flags", "kind", "text"),
    [
        ({}, {}, "None", None),
        ({"system_prompt": "line"}, {}, "custom", "line"),
        ({"system_prompt": "line"}, {"use_system_prompt": "en_unified"}, "custom", "line"),
        ({"system_prompt": "line"}, {"system_prompt": "flag"}, "custom", "line"),
        ({}, {"system_prompt": "flag"}, "custom", "flag"),
        ({}, {"system_prompt": "flag", "use_system_prompt": "custom"}, "custom", "flag"),
        ({}, {"system_prompt": "flag", "use_system_prompt": "en_unified"}, "en_unified", None),
        ({"use_system_prompt": "None"}, {"system_prompt": "flag"}, "None", None),
        ({"use_system_prompt": "custom"}, {"system_prompt": "flag"}, "custom", "flag"),
        ({}, {"use_system_prompt": "custom"}, "None", None),
    ],
)
def test_a_job_has_a_system_prompt_of_its_own_or_the_name_of_one(
    resolve: Callable[..., list[ImageJob]],
    entry: dict[str, Any],
    flags: dict[str, Any],
    kind: str,
    text: str | None,
) -> None:
    (job,) = resolve(entry, **flags)
    assert (job.use_system_prompt, job.system_prompt) == (kind, text)


def faults_of(
    entry: dict[str, Any], flags: dict[str, Any], card_of: CardOf
) -> list[tuple[str, str]]:
    jobs, faults = resolve_jobs(read(entry), settle(flags, {}, {}), card_of)
    assert bool(jobs) != bool(faults)
    return [(fault.code, fault.where) for fault in faults]


def test_a_lines_field_that_the_settings_leave_unused_is_a_fault(card_of: CardOf) -> None:
    unused = [("manifest.unconsumed", "stdin:1: temperature")]
    assert faults_of({"temperature": 0.5}, {"bot_task": "none"}, card_of) == unused
    assert faults_of({"temperature": 0.5}, {"bot_task": "think"}, card_of) == []
    assert faults_of({"temperature": 0.5, "bot_task": "think"}, {"bot_task": "none"}, card_of) == []


def test_a_flag_that_a_job_cannot_use_is_left_out(resolve: Callable[..., list[ImageJob]]) -> None:
    (job,) = resolve({"cot_text": "a red cat"}, temperature=0.9)
    assert not job.writes_text


def test_custom_needs_a_system_prompt_from_somewhere(card_of: CardOf) -> None:
    entry = {"use_system_prompt": "custom"}
    missing = [("manifest.missing-field", "stdin:1: use_system_prompt")]
    assert faults_of(entry, {}, card_of) == missing
    assert faults_of(entry, {"system_prompt": "Be bold."}, card_of) == []


def test_token_ids_beyond_the_vocabulary_are_a_fault(card_of: CardOf) -> None:
    beyond = [("manifest.out-of-range", "stdin:1: cot_token_ids")]
    assert faults_of({"cot_token_ids": [1, 328]}, {}, card_of) == beyond
    assert faults_of({"cot_token_ids": [1, 327]}, {}, card_of) == []


def test_a_model_that_a_line_names_in_vain_is_that_lines_fault(
    card: ModelCard, settings: dict[str, Setting]
) -> None:
    asked: list[str] = []

    def look_up(model: str) -> ModelCard:
        asked.append(model)
        if model == "nowhere":
            raise CheckpointError("there is no such folder", hint="look again")
        return card

    manifest = read({}, {"model": "nowhere"}, {"model": "nowhere"}, {"model": "other"}, {})
    jobs, faults = resolve_jobs(manifest, settings, look_up)
    assert [job.model for job in jobs] == ["tiny-image", "other", "tiny-image"]
    assert [fault.where for fault in faults] == ["stdin:2: model", "stdin:3: model"]
    assert asked == ["tiny-image", "nowhere", "other"]


def test_a_default_model_without_a_card_ends_the_run(settings: dict[str, Setting]) -> None:
    def look_up(model: str) -> ModelCard:
        raise CheckpointError("there is no such folder")

    with pytest.raises(CheckpointError):
        resolve_jobs(read({}), settings, look_up)


@given(counts=st.lists(st.integers(1, 4), max_size=6), seed=st.none() | st.integers(0, 2**63 - 1))
def test_every_picture_asked_for_is_one_job(
    counts: list[int], seed: int | None, card_of: CardOf
) -> None:
    manifest = read(*({"n": count} for count in counts))
    jobs, faults = resolve_jobs(manifest, settle({"seed": seed}, {}, {}), card_of)
    assert not faults
    assert len(jobs) == sum(counts)
    assert len({job.custom_id for job in jobs}) == len(jobs)
