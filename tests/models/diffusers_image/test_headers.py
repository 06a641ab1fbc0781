"""Copies of a checkpoint whose files have headers of other lengths draw with the same bits."""

import shutil
from pathlib import Path

import pytest
import torch
from models.diffusers_image.classic import Checkpoint
from safetensors.torch import save_file

from hyimg_cli.kernels.offload import Offload
from hyimg_cli.models.diffusers_image.record import read_layout
from hyimg_cli.models.diffusers_video import lora
from hyimg_cli.models.diffusers_video.weights import LoadTarget, load_weights
from hyimg_cli.spec.options import Lora

CPU = torch.device("cpu")
PADDINGS = range(0, 64, 8)


def pad_headers(folder: Path, count: int) -> None:
    """Lengthen the headers of a folder's safetensors by spaces, which mean nothing."""
    for file in folder.rglob("*.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length] + b" " * count
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


@pytest.mark.parametrize("padding", PADDINGS)
def test_weights_do_not_begin_where_a_header_ends(
    checkpoint: Checkpoint, tmp_path: Path, padding: int
) -> None:
    folder = Path(shutil.copytree(checkpoint("klein"), tmp_path / "klein"))
    pad_headers(folder, padding)
    for name, part in read_layout(folder).components.items():
        if part.has_weights:
            network = load_weights(part, LoadTarget(Offload(CPU), torch.float32))
            moved = [n for n, one in network.state_dict().items() if one.data_ptr() % 64]
            assert not moved, name


def test_a_forward_has_the_same_bits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("klein"), tmp_path / "klein"))
    drawn = []
    for _ in PADDINGS:
        part = read_layout(folder).components["transformer"]
        network = load_weights(part, LoadTarget(Offload(CPU), torch.float32))
        numbers = torch.Generator().manual_seed(1)
        own = network.config
        with torch.no_grad():
            drawn.append(
                network(
                    hidden_states=torch.randn(1, 24, own.in_channels, generator=numbers),
                    encoder_hidden_states=torch.randn(
                        1, 9, own.joint_attention_dim, generator=numbers
                    ),
                    timestep=torch.tensor([0.5]),
                    img_ids=torch.zeros(1, 24, 4),
                    txt_ids=torch.zeros(1, 9, 4),
                    guidance=None,
                    return_dict=False,
                )[0]
            )
        pad_headers(folder / "transformer", 8)
    assert all(torch.equal(one, drawn[0]) for one in drawn)


def test_loras_do_not_begin_where_a_header_ends(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("klein")
    layout = read_layout(folder)
    part = layout.components["transformer"]
    network = load_weights(part, LoadTarget(Offload(CPU), torch.float32))
    layer = "transformer_blocks.0.attn.to_out.0"
    rows, columns = part.tensors()[f"{layer}.weight"].shape
    pairs = {"A": torch.ones(4, columns), "B": torch.ones(rows, 4)}
    file = tmp_path / "a.safetensors"
    save_file({f"transformer.{layer}.lora_{n}.weight": one for n, one in pairs.items()}, file)
    for _ in PADDINGS:
        pad_headers(tmp_path, 8)
        adapters = lora.Adapters([network], layout)
        adapters.use((Lora(str(file)),))
        assert not [n for n, one in network.state_dict().items() if one.data_ptr() % 64]
        adapters.clear()
