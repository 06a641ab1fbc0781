"""Faulty inputs of `hyimg generate`: each is written into a folder and gives a command line."""

import json
import shutil
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hyimg_cli.models import registry

Maker = Callable[[Path], list[str]]
GOOD: dict[str, Any] = {"prompt": "a red circle"}
EDIT: dict[str, Any] = {"prompt": "warmer", "images": ["in.png"]}
FILM: dict[str, Any] = {"prompt": "a circle moves", "task": "t2v"}


def _run(*lines: Mapping[str, Any] | str, flags: str = "") -> Maker:
    """A manifest of these lines, run with these flags into `out`."""

    def make(place: Path) -> list[str]:
        picture = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
        Image.fromarray(picture).save(place / "in.png")
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        (place / "jobs.jsonl").write_text("".join(f"{text}\n" for text in texts))
        return ["jobs.jsonl", "-o", "out", *flags.split()]

    return make


def _with(before: Callable[[Path], object], of: Maker) -> Maker:
    """The same, with something in the folder beforehand."""

    def make(place: Path) -> list[str]:
        arguments = of(place)
        before(place)
        return arguments

    return make


def _file(name: str, data: bytes | str) -> Callable[[Path], object]:
    def write(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return write


def _result(custom_id: str, **facts: Any) -> Callable[[Path], object]:
    """A finished job of another run in the output folder."""
    entry = {"custom_id": custom_id, "status": "done", "key": "0" * 64, "attempt": 1} | facts
    output = {"path": f"outputs/{custom_id}.png", "sha256": "0" * 64}
    return _file("out/results.jsonl", json.dumps({"outputs": [output]} | entry) + "\n")


def _checkpoint(model: str, change: Callable[[Path], object], line: Mapping[str, Any]) -> Maker:
    """A changed copy of an embedded checkpoint, as the model of one line."""
    flag = "--video-model" if line is FILM else "--model"

    def copy(place: Path) -> None:
        shutil.copytree(registry.resolve_model(model), place / "copy")
        change(place / "copy")

    return _with(copy, _run(line, flags=f"{flag} ./copy"))


def _values(name: str, **values: Any) -> Callable[[Path], object]:
    """Other values in a JSON file of the checkpoint."""

    def change(folder: Path) -> None:
        known = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(known | values))

    return change


def _removed(pattern: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for path in folder.rglob(pattern):
            if path.is_file():
                path.unlink()

    return change


def _cut(pattern: str, left: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for path in folder.rglob(pattern):
            path.write_bytes(path.read_bytes()[:left])

    return change


_BAD_FIELDS: dict[str, list[Any]] = {
    "prompt": ["", " ", 7, None, "a <boi> b", "\ud83d"],
    "size": ["64", "0x64", "64x", "1:0", "9999999x64", 64, "-1:1"],
    "seed": [-1, 2**64, "seven", 1.5, True],
    "num_inference_steps": [0, -1, 10**9, "many", 2.5],
    "guidance_scale": ["strong", -1, 1e9],
    "bot_task": ["dream", 3, ""],
    "images": ["in.png", [], [""], [7], ["in.png"] * 99],
    "custom_id": ["", "../up", "a" * 300, 5, "a\nb"],
    "task": ["t2x", "it2i", 1],
    "max_new_tokens": [0, -5, "long"],
    "temperature": [-1, "hot", 99],
    "top_p": [0, 1.5, "all"],
    "top_k": [-1, "few"],
    "n": [0, -2, 10**6, "two"],
    "format": ["bmp", 1],
    "quality": [0, 101, "best"],
    "model": ["", 7, "./nowhere", "/nowhere/at/all"],
    "keep_outside": ["yes", 2, True],
    "region": ["1,2,3", "in.png"],
    "flow_shift": [0, "big"],
    "lora": ["nowhere.safetensors", 3],
    "metadata": [[1], "text"],
    "cot_text": ["told", 7],
    "negative_prompt": ["dull", 3],
    "promt": ["x"],
    "num_frames": [9],
}
_BAD_FLAGS = (
    "--steps 0", "--steps x", "--seed -1", "--size 64", "--size 0x0", "--guidance-scale -2",
    "--bot-task dream", "--model ./nowhere", "--model tiny-vide", "--select nothing*",
    "--shard 0/2", "--shard 3/2", "--shard x", "--limit 0", "--limit -1", "--format bmp",
    "--dtype int3", "--device tpu", "--quantization int3", "--quantization nf4",
    "--cpu-offload model", "--cpu-offload group", "--offload-experts", "--compile-blocks",
    "--gpu-memory-utilization 0.5", "--gpu-memory-utilization 2", "--tp-size 3", "--tp-size 0",
    "--cfg-parallel-size 3", "--context-parallel-size 2", "--tp-size 2 --device balanced",
    "--recipe nowhere.toml", "--name {seed}/{", "--name ../{custom_id}", "--name same",
    "--max-retries -1", "--batching-max-size 0", "--cache-dir jobs.jsonl/x", "--step-cache x",
    "--score nonsense", "--score nonsense:", "--score ./nowhere.py:f", "--draft-steps 2",
    "--repeat 2", "--score text --score-option text.a=1",
    "--score text --draft-steps 99", "--score text --draft-steps 0", "--score text --min 3",
    "--score text --min blip=3", "--score text --max text", "--score text --score text",
    "--score text --shard 1/2", "--score text --no-resume", "--score-python a=b --score text",
    "--pick 0 --score text", "--score judge:", "--prompt-cache maybe", "--nonsense",
    "--video-components ./nowhere", "--bot-task think --max-new-tokens 0",
)  # fmt: skip
_BAD_RECIPES = (
    "[nonsense]\nx = 1", "[sampling]\nsteps = 'x'", "[sampling]\nnonsense = 1", "not toml",
    "[batch]\nmemory_gb = 0", "[batch]\nmemory_gb = 'much'", "[model]\nmodel = './nowhere'",
    "[model]\nquantization = 'int3'",
    "[output]\nfolder = 3", "[candidates]\nscore = ['nonsense']", "[parallel]\nreplicas = 0",
    "[model]\ndecode_graphs = 'on'\noffload_experts = true", "",
)  # fmt: skip
_BAD_SOURCES: dict[str, bytes | str] = {
    "empty": b"",
    "text": "not a picture",
    "cut": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
    "raw": b"\xff\xd8\xff\xe0",
}
_BAD_REGIONS = ("nowhere.png", "0,0,0,0", "60,40,90,90", "a,b,c,d", "transparent:nowhere.png",
                "transparent:in.png", "opaque:in.png", "text.txt")  # fmt: skip


def _cases() -> dict[str, Maker]:
    found: dict[str, Maker] = {}
    for field, values in _BAD_FIELDS.items():
        for number, value in enumerate(values):
            found[f"line-{field}-{number}"] = _run(GOOD, GOOD | {field: value})
    for number, text in enumerate(("{", "[]", "7", '{"prompt": NaN}', '{"prompt": "a"} x', "\x00")):
        found[f"line-json-{number}"] = _run(GOOD, text)
    same = GOOD | {"custom_id": "a"}
    found |= {
        "manifest-empty": _run(),
        "manifest-gone": lambda place: ["gone.jsonl", "-o", "out"],
        "manifest-same-id": _run(same, same),
        "manifest-case": _run(same, GOOD | {"custom_id": "A"}),
        "manifest-invalid-left-out": _run(GOOD, {"prompt": ""}, flags="--skip-invalid"),
        "manifest-all-invalid": _run({"prompt": ""}, flags="--skip-invalid"),
        "manifest-words": _run(GOOD, flags="more.jsonl"),
        "edit-without-pictures": _run({"prompt": "x", "task": "it2i"}),
        "film-and-score": _run(FILM, flags="--score text"),
        "film-and-drafts": _run(GOOD, FILM, flags="--score text --draft-steps 2"),
        "film-context": _run(FILM, flags="--context-parallel-size 3"),
        "film-frames": _run(FILM | {"num_frames": 10**9}),
        "film-size": _run(FILM | {"size": "999999x64"}),
        "film-pictures": _run(FILM | {"images": ["in.png"]}),
        "film-too-large-a-file": _run(FILM | {"num_frames": 80001, "size": "8192x8192"}),
    }
    for number, flags in enumerate(_BAD_FLAGS):
        found[f"flag-{number}-{flags.split()[0].strip('-')}"] = _run(GOOD, EDIT, flags=flags)
    for number, text in enumerate(_BAD_RECIPES):
        recipe = _with(_file("own.toml", text), _run(GOOD, flags="--recipe own.toml"))
        found[f"recipe-{number}"] = recipe
        found[f"settings-{number}"] = _with(_file("hyimg.toml", text), _run(GOOD))
    for name, data in _BAD_SOURCES.items():
        bad = {"prompt": "x", "images": [f"{name}.png"]}
        found[f"source-{name}"] = _with(_file(f"{name}.png", data), _run(GOOD, bad))
        found[f"source-{name}-alone"] = _with(_file(f"{name}.png", data), _run(bad))
        found[f"source-{name}-retried"] = _with(
            _file(f"{name}.png", data), _run(bad, flags="--max-consecutive-errors 0")
        )
    for kept, region in product((True, False), _BAD_REGIONS):
        line = EDIT | {"keep_outside": True, "region": region}
        lines = [line] if not kept else [GOOD, line]
        found[f"mask-{region}-{'beside' if kept else 'alone'}"] = _with(
            _file("text.txt", "no mask"), _run(*lines)
        )
    one = GOOD | {"custom_id": "one"}
    for flags in ("", "--no-resume", "--no-resume --force", "--force", "--select other", "--n 2"):
        run = _run(one, GOOD | {"custom_id": "two"}, flags=flags)
        found[f"folder-other-job {flags}"] = _with(_result("one"), run)
    taken = {"path": "outputs/one.png", "sha256": "0" * 64}
    found |= {
        "folder-is-a-file": _with(_file("out", "x"), _run(GOOD)),
        "folder-below-a-file": lambda place: [*_run(GOOD)(place)[:1], "-o", "in.png/out"],
        "folder-outputs-is-a-file": _with(_file("out/outputs", "x"), _run(GOOD)),
        "folder-outputs-links-away": _with(
            lambda place: ((place / "out").mkdir(), (place / "out" / "outputs").symlink_to("/tmp")),
            _run(GOOD),
        ),
        "folder-file-of-another": _with(_result("zero", outputs=[taken]), _run(one)),
        "folder-damaged": _with(_file("out/results.jsonl", "{\n{}\n"), _run(one)),
        "folder-failed-before": _with(
            _result("one", status="failed", error={"message": "x"}), _run(one)
        ),
        "folder-drafts": _with(
            _file("out/drafts/results.jsonl", ""), _run(one, flags="--score text")
        ),
        "folder-default": lambda place: _with(_result("one"), _run(one))(place)[:1],
    }
    for model, line in (("tiny-image", GOOD), ("tiny-video", FILM)):
        config = "config.json" if line is GOOD else "model_index.json"
        for name, change in {
            "no-config": _removed(config),
            "empty-config": _cut(config, 0),
            "cut-config": _cut(config, 30),
            "config-is-a-list": _file(config, "[]"),
            "other-type": _values(config, model_type="bert", _class_name="Nothing"),
        }.items():
            found[f"checkpoint-{model}-{name}"] = _checkpoint(model, change, line)
    for name, values in {
        "no-layers": {"num_hidden_layers": 0},
        "text-layers": {"num_hidden_layers": "two"},
        "many-layers": {"num_hidden_layers": 10**9},
        "no-heads": {"num_attention_heads": 0},
        "no-vocabulary": {"vocab_size": 0},
    }.items():
        change = _values("config.json", **values)
        found[f"checkpoint-values-{name}"] = _checkpoint("tiny-image", change, GOOD)
    return found


CASES = _cases()


def _loaded() -> dict[str, Maker]:
    """Runs that end while the model is loaded."""
    found: dict[str, Maker] = {}
    for memory in ("0.001", "0.04"):
        recipe = _file("own.toml", f"[batch]\nmemory_gb = {memory}")
        found[f"memory-{memory}"] = _with(recipe, _run(GOOD, flags="--recipe own.toml"))
    odd = _values("config.json", num_key_value_heads=7)
    found["odd-heads"] = _checkpoint("tiny-image", odd, GOOD)
    for model, line in (("tiny-image", GOOD), ("tiny-video", FILM)):
        for name, change in {
            "no-weights": _removed("*.safetensors"),
            "empty-weights": _cut("*.safetensors", 0),
            "cut-header": _cut("*.safetensors", 100),
            "cut-weights": _cut("*.safetensors", 2000),
            "no-tokenizer": _removed("tokenizer*"),
            "pointers": _each("*.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        }.items():
            found[f"{model}-{name}"] = _checkpoint(model, change, line)
    return found


def _each(pattern: str, data: bytes) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for path in folder.rglob(pattern):
            path.write_bytes(data)

    return change


LOADED = _loaded()
