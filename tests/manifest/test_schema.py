"""`hyimg schema` and the readers agree on manifests of the repository and on lines good and bad."""

import io
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from hyimg_cli.cli.recipe import read_recipe
from hyimg_cli.errors import RecipeError
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.schema import json_schema, line_model, recipe_model
from hyimg_cli.settings.table import SETTINGS

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted([*ROOT.glob("recipes/*.jsonl"), *ROOT.glob("hyimg_cli/**/*.jsonl")])
LINE, RECIPE = json_schema(line_model()), json_schema(recipe_model())
A = {"prompt": "a cat"}
GOOD: tuple[dict[str, Any], ...] = (
    A,
    A | {"custom_id": "a.b-c_1", "seed": 0, "x_any": {"deep": [1, None]}, "metadata": None},
    A | {"id": "a", "image": "in/cat.png", "steps": 3},
    A | {"images": ["a.png", "b.png", "s3://b/c.png"], "task": "it2i", "size": "16:9"},
    A | {"seeds": [1, 2], "size": "auto"},
    A | {"width": 64, "height": 64, "guidance_scale": 3, "flow_shift": 0.5},
    A | {"bot_task": "image"},
    A | {"matrix": {"guidance_scale": [2.5, 5], "seed": [1, 2], "model": ["a"], "steps": [1]}},
    A | {"task": "t2v", "matrix": {"num_frames": [5, 9], "negative_prompt": ["", "blur"]}},
    A | {"format": "jpg", "quality": 80, "name": "{folder}/{stem}-{index:04}"},
    A | {"output_format": "webp", "lossless": True},
    A | {"task": "t2v", "name": "film-{seed}"},
    A | {"use_system_prompt": "None", "top_p": 1, "temperature": 0.5, "n": 3},
    A | {"cot_token_ids": [1, 2, 3], "drop_think": True},
    A | {"negative_prompt": " "},
    A | {"task": "t2v", "negative_prompt": "", "num_frames": 9, "fps": 8, "guidance_scale_2": 1},
    {"url": "/v1/images/generations", "body": A, "custom_id": "b", "method": "POST"},
    {
        "url": "/v1/images/generations",
        "body": A,
        "custom_id": "Order 12: cat.jpg",
        "method": "post",
    },
    {"url": "/v1/images/generations", "body": A, "id": "Größe: 7/8", "method": "Post"},
    {"url": "/v1/videos", "body": A | {"num_frames": 5}},
)
BAD: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": " "},
    {"prompt": "a\0b"},
    {"prompt": 3},
    A | {"sed": 1},
    A | {"seed": None},
    A | {"seed": -1},
    A | {"seed": "1"},
    A | {"seed": True},
    A | {"seed": 2**63},
    A | {"n": 0},
    A | {"seeds": []},
    A | {"seeds": [1, 1]},
    A | {"steps": 1001},
    A | {"guidance_scale": True},
    A | {"guidance_scale": "3"},
    A | {"flow_shift": 0},
    A | {"top_p": 1.5},
    A | {"size": "64"},
    A | {"size": 64},
    A | {"custom_id": ".hidden"},
    A | {"custom_id": "a\n"},
    A | {"custom_id": "a" * 129},
    A | {"images": ["a"] * 13},
    A | {"images": "https://example.com/cat.png"},
    A | {"images": "HTTP://example.com/cat.png"},
    A | {"images": ["file:///cat.png"]},
    A | {"images": "DATA:image/png;base64,AA"},
    A | {"images": [""]},
    A | {"task": "edit"},
    A | {"bot_task": "dream"},
    A | {"drop_think": 1},
    A | {"use_system_prompt": ""},
    A | {"num_frames": 9},
    A | {"task": "t2v", "images": ["a.png"]},
    A | {"task": "t2v", "infer_align_image_size": True},
    A | {"task": "t2v", "fps": 0},
    A | {"matrix": {}} | {"matrix": [1]},
    A | {"matrix": {"seed": 1}},
    A | {"matrix": {"seed": []}},
    A | {"matrix": {"seed": [-1]}},
    A | {"matrix": {"sede": [1]}},
    A | {"matrix": {"seed": [1, 1]}},
    A | {"matrix": {"num_frames": [5]}},
    A | {"task": "t2v", "matrix": {"bot_task": ["none"]}},
    A | {"format": "gif"},
    A | {"quality": 0, "format": "jpeg"},
    A | {"name": " "},
    A | {"task": "t2v", "format": "webp"},
    {"url": "/v1/chat", "body": A},
    {"url": "/v1/videos"},
    {"url": "/v1/videos", "body": "a cat"},
    {"url": "/v1/videos", "body": A, "method": "GET"},
    {"url": "/v1/videos", "body": A, "method": "POSTS"},
    {"custom_id": "", "url": "/v1/videos", "body": A},
    {"custom_id": 7, "url": "/v1/videos", "body": A},
    A | {"custom_id": "Order 12: cat.jpg"},
)
# What only several fields together, or other lines, tell: the reader's alone.
TOGETHER: tuple[dict[str, Any], ...] = (
    A | {"n": 2, "seeds": [1]},
    A | {"n": 2, "matrix": {"seed": [1]}},
    A | {"matrix": {"seed": [*range(40)], "steps": [*range(1, 41)]}},
    A | {"steps": 1, "num_inference_steps": 1},
    A | {"width": 64},
    A | {"task": "it2i"},
    A | {"bot_task": "none", "temperature": 1},
    A | {"size": "9000x16"},
    A | {"name": "../{stem}"},
    A | {"name": "{steam}"},
)


def reads(entry: dict[str, Any]) -> bool:
    return not read_manifest("-", io.StringIO(json.dumps(entry) + "\n")).faults


def fits(entry: dict[str, Any], schema: dict[str, Any] | None = None) -> bool:
    """By the schema that is published, as an editor reads it."""
    return Draft202012Validator(schema or LINE).is_valid(entry)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_of_the_repository_fit(path: Path) -> None:
    entries = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    assert entries
    assert all(map(fits, entries))
    assert not read_manifest(path).faults


@pytest.mark.parametrize("entry", [*GOOD, *BAD], ids=str)
def test_schema_and_reader_agree_on_a_line(entry: dict[str, Any]) -> None:
    assert reads(entry) is fits(entry) is (entry in GOOD)


@pytest.mark.parametrize("entry", TOGETHER, ids=str)
def test_the_reader_sees_more(entry: dict[str, Any]) -> None:
    assert fits(entry)
    assert not reads(entry)


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("", True),
        ('[model]\nmodel = "a/b"\ndevice = "cuda:1"\ndecode_graphs = false\n', True),
        ('[sampling]\nsize = "64x96"\nbot_task = "image"\nguidance_scale = 3\n', True),
        ("[batch]\ngpu_memory_utilization = 1\nmemory_gb = 80\n", True),
        ('[output]\nframes = "png"\n', True),
        ("[batch]\ngpu_memory_utilization = 0\n", False),
        ('[model]\ndevice = "gpu"\n', False),
        ("[model]\ndecode_graphs = 1\n", False),
        ("[model]\nseed = 1\n", False),
        ("[sampling]\nsede = 1\n", False),
        ("[smapling]\nseed = 1\n", False),
        ("seed = 1\n", False),
        ("[failure]\nmax_retries = true\n", False),
        ("[failure]\nmax_retries = 101\n", False),
    ],
)
def test_schema_and_reader_agree_on_a_recipe(tmp_path: Path, text: str, is_good: bool) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert fits(tomllib.loads(text), RECIPE) is is_good
    try:
        read_recipe(path)
    except RecipeError:
        assert not is_good
    else:
        assert is_good


def test_the_command_prints_both(run_cli: Callable[..., Any]) -> None:
    line, recipe = (json.loads(run_cli("schema", name).out) for name in ("line", "recipe"))
    assert line == LINE
    assert recipe == RECIPE
    assert line["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    pictures, videos = line["$defs"]["Pictures"], line["$defs"]["Videos"]
    assert (pictures["additionalProperties"], [*pictures["patternProperties"]]) == (False, ["^x_"])
    assert pictures["required"] == ["prompt"]
    assert sorted(videos["required"]) == ["prompt", "task"]
    steps = {
        "type": "integer",
        "minimum": 1,
        "maximum": 1000,
        "description": "Number of denoise steps.",
    }
    assert pictures["properties"]["num_inference_steps"] == steps
    assert pictures["properties"]["steps"] == steps
    assert pictures["properties"]["bot_task"]["enum"][-1] == "image"
    assert "default" not in pictures["properties"]["seed"]


def test_a_recipes_schema_has_every_setting_with_its_default(run_cli: Callable[..., Any]) -> None:
    for name, row in SETTINGS.items():
        found = RECIPE["$defs"][row.table]["properties"][name]
        assert found["description"] == row.help
        if isinstance(row.default, str | int | float):
            assert found["default"] == row.default


def test_of_what_else_is_refused(run_cli: Callable[..., Any]) -> None:
    ran = run_cli("schema", "recipes")
    assert (ran.code, ran.out) == (2, "")
    assert "did you mean recipe?" in ran.err
