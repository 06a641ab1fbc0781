"""A rank's share of a checkpoint: together they are the checkpoint, and no rank holds more."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from wide_checkpoint import Anonymous, wide_checkpoint

from hyimg_cli.errors import CheckpointError
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.card import model_card, read_architecture
from hyimg_cli.models.hunyuan_image3.config import architecture
from hyimg_cli.models.hunyuan_image3.sharded import Cuts, Share
from hyimg_cli.models.hunyuan_image3.split import heads_of_rank, rank_bytes, split_weights
from hyimg_cli.models.hunyuan_image3.weights import expected_shapes, load
from hyimg_cli.settings.run import Quantization

FOLDER = registry.resolve_model(registry.EMBEDDED)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shares_put_together_are_the_checkpoint(ranks: int) -> None:
    """Rows and columns of every matrix, as often as there are ranks that have a kv head."""
    arch = read_architecture(FOLDER)
    every = [Cuts(arch, Share(number, ranks)) for number in range(ranks)]
    for name, tensor in load_file(FOLDER / "model.safetensors").items():
        cuts = [cuts.of(name) for cuts in every]
        if cuts[0] is None:
            assert cuts == [None] * ranks
            continue
        kept = torch.cat([cut.index for cut in cuts if cut is not None])
        assert set(kept.tolist()) == set(range(tensor.shape[cuts[0].dim])), name
        has_twice = "qkv_proj" in name and ranks > arch.num_key_value_heads
        assert (len(kept) > len(kept.unique())) == has_twice


@pytest.mark.parametrize("quantization", ["none", "fp8", "nf4"])
def test_weights_are_the_checkpoints_own(
    quantization: Quantization, small_config: dict[str, Any], tmp_path: Path
) -> None:
    """Every rank has the numbers that one process would have, in its rows and columns."""
    config = small_config | {"moe_intermediate_size": [128] * small_config["num_hidden_layers"]}
    folder = _written(tmp_path / "checkpoint", config)
    whole = load(folder, share=Share(0, 1), dtype=torch.float32, quantization=quantization)
    cuts = Cuts(whole.arch, Share(1, 2))
    share = load(folder, share=Share(1, 2), dtype=torch.float32, quantization=quantization)
    for number, (layer, full) in enumerate(
        zip(share.model.layers, whole.model.layers, strict=True)
    ):
        for part in ("gate_and_up_proj", "down_proj"):
            cut = cuts.of(f"model.layers.{number}.mlp.experts.0.{part}.weight")
            assert cut is not None
            ours, theirs = (_expert(moe, part) for moe in (layer.mlp.partial, full.mlp))
            assert torch.equal(ours, theirs.index_select(cut.dim, cut.index))
    outside = [name for name, p in share.named_parameters() if not p.is_meta]
    assert all(name.startswith("model.layers.") for name in outside)


def _written(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = expected_shapes(architecture(config))
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _expert(moe: Any, part: str) -> torch.Tensor:
    """Expert 2's matrix, made dense."""
    first = moe.experts[0]
    if hasattr(first, "one"):
        stack = moe.experts[0 if part == "gate_and_up_proj" else 1]
        return stack.one(2, torch.float32)
    weight: torch.Tensor = getattr(moe.experts[2], part).weight
    return weight


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_bytes_are_those_that_were_promised(quantization: Quantization) -> None:
    card, arch = (
        model_card(FOLDER, registry.EMBEDDED),
        read_architecture(FOLDER),
    )
    for ranks, dtype in ((1, "float32"), (2, "bfloat16"), (4, "float32")):
        promised = rank_bytes(card.weights, arch, ranks, dtype=dtype, quantization=quantization)
        form = {"dtype": getattr(torch, dtype), "quantization": quantization}
        held = [_nbytes(load(FOLDER, share=Share(n, ranks), **form)) for n in range(ranks)]
        assert held[0] == promised.first
        assert max(held[1:], default=promised.other) == promised.other
        if ranks == 1:
            assert promised.first == card.loaded_bytes(dtype, quantization)
            assert promised.kv_share == 1


def test_released_numbers_by_rank(released_config: dict[str, Any]) -> None:
    arch = architecture(released_config)
    assert split_weights(arch, 4) * 4 == split_weights(arch, 1)
    assert heads_of_rank(arch, 4)[0] == 2
    # More ranks than kv heads: k and v are there twice.
    assert split_weights(arch, 16) * 16 > split_weights(arch, 1)


def _nbytes(network: Any) -> int:
    tensors = [*network.parameters(), *network.buffers()]
    return sum(t.nbytes for t in tensors if not t.is_meta)


def test_no_rank_ever_holds_more_than_its_share(
    tmp_path: Path, small_config: dict[str, Any]
) -> None:
    """Of 100 MB of experts in bfloat16 a rank of two takes half, as it reads them."""
    layers, experts = small_config["num_hidden_layers"], 128
    config = small_config | {"num_experts": experts, "moe_intermediate_size": [640] * layers}
    folder = wide_checkpoint(tmp_path / "wide", config)
    (folder / "config.json").write_text(json.dumps(config))
    whole = layers * experts * 3 * 640 * config["hidden_size"] * 2
    with Anonymous() as memory:
        network = load(folder, share=Share(1, 2), dtype=torch.bfloat16)
    assert whole > 90e6
    assert 0.5 * whole < _nbytes(network) < 0.53 * whole
    assert memory.grown < _nbytes(network) + 0.1 * whole


def test_a_checkpoint_is_checked_whole_on_every_rank(tmp_path: Path, small_folder: Path) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / "config.json").write_bytes((small_folder / "config.json").read_bytes())
    tensors = load_file(small_folder / "model.safetensors")
    for change, what in (
        (lambda t: t.pop("lm_head.weight"), "1 missing: lm_head.weight"),
        (lambda t: t.update(other=torch.zeros(1)), "1 unexpected: other"),
    ):
        changed = dict(tensors)
        change(changed)
        save_file(changed, target / "model.safetensors")
        for number in (0, 1):
            with pytest.raises(CheckpointError, match=what):
                load(target, share=Share(number, 2), dtype=torch.float32)
