"""The exported checkpoint: official names and dtypes, and nothing held out in its training."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_world.architecture import tiny_architecture
from tiny_world.evaluate import questions
from tiny_world.export import Provenance, export
from tiny_world.heldout import held_out
from tiny_world.scenes import Scene
from tiny_world.tokenizer import trained_tokenizer

from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM


def _export(folder: Path, seen: frozenset[Scene]) -> None:
    tokenizer = trained_tokenizer(captions=600)
    network = HunyuanImage3ForCausalMM(tiny_architecture(tokenizer, 0.5))
    export(network, tokenizer, Provenance(False, seen, "# card\n"), folder)


def test_weights_are_stored_as_in_a_released_checkpoint(tmp_path: Path) -> None:
    _export(tmp_path, frozenset())
    weights = load_file(tmp_path / "model.safetensors")
    routers = {name for name, t in weights.items() if t.dtype == torch.float32}
    assert routers == {f"model.layers.{n}.mlp.gate.wg.weight" for n in range(4)}
    assert {t.dtype for t in weights.values()} == {torch.float32, torch.bfloat16}
    taps = weights["vae.decoder.conv_in.weight"]
    assert not taps[:, :, [0, 2]].any()
    assert taps[:, :, 1].any()


def test_config_names_what_the_weights_are(tmp_path: Path) -> None:
    _export(tmp_path, frozenset())
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    assert config["vae"]["scaling_factor"] == 0.5
    assert weights["model.wte.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert json.loads((tmp_path / "card.json").read_text())["trained"] is False


def test_a_run_that_drew_a_held_out_scene_is_refused(tmp_path: Path) -> None:
    leaked = next(iter(held_out().scenes))
    with pytest.raises(AssertionError, match="held-out"):
        _export(tmp_path, frozenset([leaked]))
    assert not (tmp_path / "model.safetensors").exists()


def test_questions_cover_every_kind_once() -> None:
    asked = questions(8)
    assert len({question.custom_id for question in asked}) == len(asked)
    assert {question.kind for question in asked} >= {"new", "new-direct", "plain", "edit-direct"}
