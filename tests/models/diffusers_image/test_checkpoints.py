"""Checkpoints that are not what their index says: exit 3, by name, before a weight is read."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.diffusers_image.classic import Checkpoint, line
from safetensors.torch import load_file, save_file

Change = Callable[[Path], object]
WEIGHTS = "diffusion_pytorch_model.safetensors"


def in_json(name: str, **changes: Any) -> Change:
    """Other values in a JSON file."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def in_weights(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Other tensors in a file of weights."""

    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return rewrite


def as_pickle(folder: Path) -> None:
    path = folder / "transformer" / WEIGHTS
    path.with_suffix(".bin").write_bytes(pickle.dumps({"a": 1}))
    path.unlink()


def with_own_code(folder: Path) -> None:
    (folder / "transformer" / "mine.py").write_text("raise SystemExit('it ran')\n")
    in_json("transformer/config.json", auto_map={"AutoModel": "mine.Transformer"})(folder)


AT_CHECK: dict[str, tuple[Change, str]] = {
    "another pipeline": (in_json("model_index.json", _class_name="FluxFillPipeline"), "Fill"),
    "a pipeline of its own": (in_json("model_index.json", _class_name=["mine", "P"]), "_class"),
    "a part of its own": (in_json("model_index.json", vae=["mine", "Vae"]), "mine"),
    "code of its own": (with_own_code, "needs its own code"),
    "another text encoder": (
        in_json("model_index.json", text_encoder=["transformers", "LlamaModel"]), "LlamaModel",
    ),
    "another scheduler": (
        in_json("model_index.json", scheduler=["diffusers", "DDIMScheduler"]), "DDIMScheduler",
    ),
    "a folder missing": (lambda folder: shutil.rmtree(folder / "tokenizer"), "tokenizer/"),
    "a part missing": (in_json("model_index.json", tokenizer=None), "tokenizer"),
    "pickles": (as_pickle, "safetensors"),
    "stored quantized": (
        in_json("text_encoder/config.json", quantization_config={"quant_method": "awq"}), "awq",
    ),
    "positions of another width": (
        in_json("transformer/config.json", axes_dims_rope=[2, 2, 2]), "axes_dims_rope",
    ),
}  # fmt: skip
AT_LOAD: dict[str, tuple[Change, str]] = {
    "a tensor missing": (
        in_weights(f"transformer/{WEIGHTS}", lambda tensors: tensors.pop(min(tensors))), "missing",
    ),
    "a tensor more": (
        in_weights(f"vae/{WEIGHTS}", lambda tensors: tensors.update(a=torch.zeros(1))), "a",
    ),
    "a tensor of another shape": (
        in_weights(
            f"transformer/{WEIGHTS}",
            lambda tensors: tensors.update({min(tensors): torch.zeros(1, 2, 3)}),
        ),
        "1, 2, 3",
    ),
    "no weights": (
        lambda folder: (folder / "text_encoder" / "model.safetensors").unlink(), "text_encoder",
    ),
    "an encoder of pictures that has no name": (
        in_json("text_encoder/config.json", vision_config={"model_type": {}}), "model_type",
    ),
    "half a file": (
        lambda folder: (folder / "vae" / WEIGHTS).write_bytes(
            (folder / "vae" / WEIGHTS).read_bytes()[:1000]
        ),
        "vae",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["kontext", "longcat-edit"])
@pytest.mark.parametrize("wrong", [*AT_CHECK, *AT_LOAD])
def test_a_checkpoint_that_is_wrong_is_refused_by_name(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str, wrong: str,
) -> None:  # fmt: skip
    folder = tmp_path / "wrong"
    shutil.copytree(checkpoint(kind), folder)
    change, named = (AT_CHECK | AT_LOAD)[wrong]
    change(folder)
    manifest = str(write_manifest(line("a", "red", "s0.png", size="auto")))
    command = ("plan",) if wrong in AT_CHECK else ("generate", "-o", str(tmp_path / "out"))
    ran = run_cli(command[0], manifest, *command[1:], "--model", str(folder))
    assert ran.code == 3, ran.err
    assert "error[checkpoint." in ran.err, ran.err
    assert named in ran.err
    assert "\n  hint: " in ran.err
