"""What is larger than a network or longer than its encoder takes is said before a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import thorough_but
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope
from diffusers.models.transformers.transformer_z_image import RopeEmbedder
from models.diffusers_image.classic import Checkpoint, line

# By kind: a number of words that is read, one that is not, and the end of what is said.
CUT = {
    "qwen-image": "longer than the 512 tokens that the text_encoder reads: the rest is ignored",
    "klein": "longer than the 512 tokens that the text_encoder reads: the rest is ignored",
    "z-image": "longer than the 512 tokens that the text_encoder reads: the rest is ignored",
    "flux2-dev": "longer than the 512 tokens that the text_encoder reads: the rest is ignored",
    "flux3": "longer than the 8,184 tokens that the text_encoder reads: the rest is ignored",
    "flux-schnell": "longer than the 255 tokens that the text_encoder_2 reads: the rest is ignored",
    "krea2": "longer than the 507 tokens that the text_encoder reads: the rest is ignored",
    "kontext": "longer than the 75 tokens that the text_encoder reads: the rest is ignored",
}
REFUSED = {
    "longcat": "tokens; its text_encoder reads 512",
    "longcat-edit": "tokens; its text_encoder reads 512",
    "qwen-image-edit": "tokens; its text_encoder reads 3,840",
    "qwen-image-edit-plus": "tokens; its text_encoder reads 3,840",
    "qwen-image-2.1": "tokens; its text_encoder reads 7,168",
}
SHORT, LONG = "red " * 15, "red " * 8000


def given(kind: str, prompt: str) -> dict[str, Any]:
    images = ("s0.png",) if "edit" in kind else ()
    one: dict[str, Any] = line("a", prompt, *images, size="auto" if images else "96x64")
    return one | {"num_inference_steps": 2}


@pytest.mark.parametrize("kind", thorough_but(("klein", "kontext"), CUT))
def test_a_text_that_is_cut_is_named_before_and_after_the_run(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, kind: str
) -> None:
    model = ("--model", checkpoint(kind))
    for command in ("check", "plan"):
        assert "is ignored" not in run_cli(command, write_manifest(given(kind, SHORT)), *model).err
        ran = run_cli(command, write_manifest(given(kind, LONG)), *model)
        assert (ran.code, f"a prompt is {CUT[kind]}" in ran.err) == (0, True), ran.err
    run_cli("generate", write_manifest(given(kind, LONG)), *model, "-o", "out")
    (result,) = map(json.loads, Path("out/results.jsonl").read_text().splitlines())
    assert any("was cut" in one or "was ignored" in one for one in result["warnings"])


@pytest.mark.parametrize("kind", thorough_but(("longcat", "qwen-image-2.1"), REFUSED))
def test_a_text_that_cannot_be_cut_is_refused_before_the_run(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str], kind: str
) -> None:
    model = ("--model", checkpoint(kind))
    assert run_cli("check", write_manifest(given(kind, SHORT)), *model).code == 0
    for command in (("check",), ("plan",), ("generate", "-o", "out")):
        ran = run_cli(command[0], write_manifest(given(kind, LONG)), *command[1:], *model)
        assert (ran.code, REFUSED[kind] in ran.err) == (2, True), ran.err


def test_the_library_would_read_later_positions_as_negative_ones() -> None:
    """Why Qwen-Image-2.1 refuses long texts: nothing fails there."""
    rope = QwenImage21Rope(10000, [4, 4, 4])
    text = torch.zeros(8193, dtype=torch.bool)
    found = rope([], text, torch.device("cpu"))
    right, read = (rope.rope_params(torch.tensor([at]), 4)[0].repeat(3) for at in (8192, -1024))
    assert torch.equal(found[8192], read)
    assert not torch.allclose(found[8192], right)


def test_a_picture_beyond_the_positions_is_refused(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Of Z-Image: 64 rows and 80 columns of 16 pixels."""
    folder = tmp_path / "own"
    shutil.copytree(checkpoint("z-image"), folder)
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"axes_lens": [1024, 64, 80]}))
    for size, code in (("1280x1024", 0), ("1296x1024", 2), ("1024x1040", 2), ("1024x1280", 2)):
        manifest = write_manifest(line("a", "red", size=size))
        for command in ("check", "plan"):
            ran = run_cli(command, manifest, "--model", folder)
            assert ran.code == code, ran.err
            assert ("is larger than 1280x1024" in ran.err) == bool(code)
    with pytest.raises(IndexError):
        RopeEmbedder(256.0, [8, 4, 4], [1024, 64, 80])(torch.tensor([[1, 64, 0]]))
