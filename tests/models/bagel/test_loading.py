"""Strict loading, both ways; each fault has its own error."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hyimg_cli.errors import CheckpointError, UsageError
from hyimg_cli.kernels.formats import empty_stack
from hyimg_cli.models import registry
from hyimg_cli.models.bagel.config import read_architecture
from hyimg_cli.models.bagel.family import Bagel
from hyimg_cli.models.bagel.weights import checked, without_weights
from hyimg_cli.settings.run import ModelChoice

from .conftest import JOB, Runs, latents

# The released numbers, which no file of this repository has.
RELEASED_LLM = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
RELEASED_VIT = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
}


@pytest.fixture
def folder(bagel_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(bagel_folder, tmp_path / "broken")


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _store(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _swap_shape(tensors: dict[str, torch.Tensor]) -> None:
    name = "vit_model.vision_model.embeddings.patch_embedding.weight"
    tensors[name] = tensors[name].reshape(-1, 3, 14, 14).contiguous()


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("ema", lambda t: t.pop("llm2vae.bias"), "1 missing: llm2vae.bias"),
        ("ema", lambda t: t.update(extra=torch.zeros(1)), "1 unexpected: extra"),
        ("ema", _swap_shape, "with another shape"),
        ("ae", lambda t: t.pop("encoder.mid.attn_1.q.bias"), "encoder.mid.attn_1.q.bias"),
        ("ae", lambda t: t.update(extra=torch.zeros(1)), "1 unexpected: extra"),
    ],
)
def test_every_key_and_no_other(folder: Path, file: str, change: Any, said: str) -> None:
    _store(folder / f"{file}.safetensors", change)
    with pytest.raises(CheckpointError) as found:
        checked(folder)
    assert said in found.value.what
    assert found.value.code == "checkpoint.mismatch"
    assert found.value.where.endswith(f"{file}.safetensors")


def test_a_missing_vae(folder: Path) -> None:
    (folder / "ae.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"ae\.safetensors is missing; the folder has ema"
    ) as found:
        checked(folder)
    assert found.value.code == "checkpoint.no-weights"


def test_a_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        registry.model_card(str(folder))


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", lambda c: c.update(interpolate_pos=True), "interpolate_pos is True"),
        ("llm_config.json", lambda c: c.update(hidden_act="gelu"), "hidden_act is 'gelu'"),
        ("llm_config.json", lambda c: c.pop("rope_theta"), "rope_theta is missing"),
        ("vit_config.json", lambda c: c.update(patch_size="x"), "patch_size is 'x'"),
        ("llm_config.json", lambda c: c.update(hidden_size=32), "with another shape"),
        (
            "llm_config.json",
            lambda c: c.update(num_hidden_layers=10**9),
            "less than or equal to 10000",
        ),
        ("config.json", lambda c: c["vae_config"].update(ch=1 << 40), r"vae_config\.ch is"),
        (
            "config.json",
            lambda c: c["vae_config"].update(ch_mult=[1, 1]),
            r"vae_config\.ch_mult is",
        ),
    ],
)
def test_a_configuration_of_another_network(
    folder: Path, file: str, change: Any, said: str
) -> None:
    _edit(folder / file, change)
    with pytest.raises(CheckpointError, match=said):
        checked(folder)


def test_configurations_within_one_file(folder: Path, bagel_folder: Path) -> None:
    parts = ("llm_config", "vit_config")
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in parts}
    _edit(folder / "config.json", lambda config: config.update(found))
    for name in parts:
        (folder / f"{name}.json").unlink()
    assert checked(folder)[0].arch == checked(bagel_folder)[0].arch


def test_a_table_that_is_no_square(folder: Path) -> None:
    name = "latent_pos_embed.pos_embed"
    _store(folder / "ema.safetensors", lambda t: t.update({name: t[name][:60].clone()}))
    with pytest.raises(CheckpointError, match="60 rows; expected a square number"):
        checked(folder)


def test_the_files_say_as_many_layers_as_there_are(folder: Path) -> None:
    """A copy whose configuration was mended loads as the released one does."""
    _edit(folder / "vit_config.json", lambda config: config.update(num_hidden_layers=3))
    assert checked(folder)[0].arch.vision.num_hidden_layers == 2
    stored = load_file(folder / "ema.safetensors")
    third = {n.replace("layers.1", "layers.2"): t for n, t in stored.items() if "vit_model" in n}
    _store(folder / "ema.safetensors", lambda tensors: tensors.update(third))
    assert checked(folder)[0].arch.vision.num_hidden_layers == 3


def test_the_released_shapes(folder: Path) -> None:
    """Before the weights are here: 26 ViT layers of 27, a table of 64 x 64 where 32 is said."""
    _edit(folder / "llm_config.json", lambda config: config.update(RELEASED_LLM))
    _edit(folder / "vit_config.json", lambda config: config.update(RELEASED_VIT))
    left_out = ("vae_config", "image_transforms", "vit_max_num_patch_per_side")
    _edit(folder / "config.json", lambda config: [config.pop(name) for name in left_out])
    for file in folder.glob("*.safetensors"):
        file.unlink()
    arch = read_architecture(folder)
    assert (arch.vision.num_hidden_layers, arch.table_side) == (26, 64)
    network, vae = without_weights(arch)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    counts = {name: value.numel() for name, value in network.state_dict().items()}
    assert shapes["vit_model.vision_model.embeddings.patch_embedding.weight"] == (1152, 588)
    assert shapes["latent_pos_embed.pos_embed"] == (4096, 3584)
    assert shapes["vit_pos_embed.pos_embed"] == (4900, 3584)
    assert shapes["language_model.model.layers.27.mlp_moe_gen.down_proj.weight"] == (3584, 18944)
    assert (
        round(sum(n for k, n in counts.items() if k.startswith("language_model.")) / 1e9, 2)
        == 14.14
    )
    assert len(vae.state_dict()) == 244
    card = registry.model_card(str(folder))
    assert (card.kv_bytes_per_token, card.base_size) == (57344, 1024)
    assert [str(bucket.size) for bucket in card.buckets] == [
        *("1024x1024", "1024x768", "768x1024", "1024x576", "576x1024"),
    ]


def test_no_graphs(bagel_folder: Path) -> None:
    with pytest.raises(UsageError, match="does not follow decode_graphs on"):
        registry.load(ModelChoice(str(bagel_folder), device="cpu", decode_graphs="on"))


@pytest.mark.parametrize("form", ["fp8", "nf4"])
def test_in_fewer_bits(bagel_folder: Path, form: Any) -> None:
    """As many bytes as the card says; the latents of the weights that are left, to the bit."""
    choice = ModelChoice(str(bagel_folder), device="cpu", quantization=form)
    held, plain = registry.load(choice), registry.load(replace(choice, quantization="none"))
    assert isinstance(held, Bagel)
    assert isinstance(plain, Bagel)
    networks = (held.network, held.codec.vae)
    tensors = (t for one in networks for t in (*one.parameters(), *one.buffers()))
    assert sum(t.nbytes for t in tensors) == held.card.loaded_bytes("float32", form)
    before = latents(Runs(plain).one(JOB))
    for layer in plain.network.decoder.layers:
        for one in layer.modules():
            if isinstance(one, nn.Linear):
                stack = empty_stack(form, 1, *one.weight.shape, torch.device("cpu"))
                stack.put(0, one.weight)
                one.weight.data = stack.one(0, torch.float32)
    found = latents(Runs(held).one(JOB))
    assert torch.equal(found, latents(Runs(plain).one(JOB)))
    assert not torch.equal(found, before)


def test_layers_are_not_split(bagel_folder: Path) -> None:
    with pytest.raises(UsageError, match="cannot be split"):
        registry.sequences(str(bagel_folder)).refuse_uneven(2, "none")


def test_the_family_of_a_folder(bagel_folder: Path) -> None:
    assert registry.model_card(str(bagel_folder)).family == "bagel"
    assert registry.model_card(registry.EMBEDDED).family == "hunyuan_image3"
    before = registry._family(bagel_folder).fingerprint(bagel_folder)
    assert before == registry.fingerprint(str(bagel_folder))
