"""Damaged checkpoints of pictures through the command: exit code 3, and what is wrong by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hyimg_cli.models import registry

Run = Callable[..., Any]
JOB = {"custom_id": "a", "prompt": "a red circle", "bot_task": "none", "num_inference_steps": 1}
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded checkpoint; its weights are a link until somebody writes others."""
    source, target = registry.resolve_model("tiny-image"), tmp_path / "copied"
    target.mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    (target / WEIGHTS).symlink_to(source / WEIGHTS)
    return target


def _json(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        told = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(told))

    return change


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        data = change((folder / name).read_bytes())
        (folder / name).unlink()
        (folder / name).write_bytes(data)

    return write


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (_bytes("config.json", lambda _: b""), "config.json cannot be read"),
    (_bytes("config.json", lambda _: b"[]"), "config.json is not a JSON object"),
    (_json("config.json", vae=[]), "vae is []; expected a valid dictionary"),
    (_json("config.json", moe_topk=99), "moe_topk is 99; expected less than or equal to 4"),
    (_json("config.json", num_attention_heads=0), "num_attention_heads is 0"),
    (_json("config.json", quantization_config={"quant_method": "gptq"}), "quantized with 'gptq'"),
    (
        _json("generation_config.json", repetition_penalty=0),
        "repetition_penalty is 0; expected greater than 0",
    ),
    (_json("generation_config.json", min_p=0.1), "min_p = 0.1 is not supported"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    (_bytes("tokenizer.json", lambda data: data[:500]), "tokenizer.json cannot be read"),
    (_bytes("tokenizer_config.json", lambda _: b"{"), "tokenizer_config.json cannot be read"),
    (lambda folder: (folder / WEIGHTS).unlink(), "neither model.safetensors nor"),
    (_bytes(WEIGHTS, lambda data: data[:-5]), "model.safetensors is damaged"),
    (_bytes(WEIGHTS, lambda data: data[:8] + b"A" + data[9:]), "invalid JSON in header"),
    (lambda folder: (folder / WEIGHTS).rename(folder / "m.gguf"), "the weights are GGUF (m.gguf)"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES, ids=[said for _, said in DAMAGES])
def test_check_and_generate_name_what_is_wrong(
    run_cli: Run,
    write_manifest: Callable[..., Path],
    folder: Path,
    damage: Callable[[Path], Any],
    said: str,
) -> None:
    damage(folder)
    manifest = write_manifest(JOB)
    for command in (("check", manifest), ("generate", manifest, "-o", "out", "--device", "cpu")):
        ran = run_cli(*command, "--model", folder)
        assert ran.code == 3
        assert said in " ".join(ran.err.split())
        assert "error[checkpoint." in ran.err


def test_the_model_of_a_later_job_is_compared_before_the_first_job(
    run_cli: Run, write_manifest: Callable[..., Path], folder: Path
) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights[min(weights)]
    (folder / WEIGHTS).unlink()
    save_file(weights, folder / WEIGHTS)
    manifest = write_manifest(JOB, JOB | {"custom_id": "b", "model": str(folder)})
    said = run_cli("check", manifest).err
    ran = run_cli("generate", manifest, "-o", "out", "--device", "cpu", "--dtype", "float32")
    assert (ran.code, "checkpoint.mismatch" in ran.err) == (3, True), ran.err
    fault = ran.err[ran.err.index("error[") :]
    assert fault.splitlines()[0] in said
    assert Path("out", "results.jsonl").read_bytes() == b""
