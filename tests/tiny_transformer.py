"""The official HunyuanVideo-1.5 transformer with few channels, and a rank's view of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.parallel.ranks import Rank

LATENTS = (1, 4, 2, 4, 6)


def write_transformer(folder: Path, dtype: torch.dtype) -> Path:
    """HunyuanVideo15Transformer3DModel of random weights, saved as released ones are."""
    from diffusers import HunyuanVideo15Transformer3DModel

    torch.manual_seed(11)
    model = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=32,
        text_embed_2_dim=24,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        target_size=64,
        task_type="t2v",
    )
    for name, parameter in model.named_parameters():
        if "proj_out" in name or "norm_out" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.to(dtype=dtype).save_pretrained(folder)
    return folder


def branch_inputs(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Embeddings of a prompt and of a negative prompt, of different lengths."""
    generator = torch.Generator().manual_seed(3)

    def embeddings(valid: int) -> dict[str, Tensor]:
        mask = (torch.arange(12) < valid)[None]
        return {
            "encoder_hidden_states": torch.randn(1, 12, 32, generator=generator).to(dtype),
            "encoder_attention_mask": mask,
            "encoder_hidden_states_2": torch.randn(1, 5, 24, generator=generator).to(dtype),
            "encoder_attention_mask_2": torch.ones(1, 5, dtype=torch.bool),
            "image_embeds": torch.zeros(1, 3, 16, dtype=dtype),
        }

    return [embeddings(12), embeddings(4)]


@dataclass
class Transformer:
    """The model as `ParallelBranches` wants it."""

    network: Any

    def branch(self, inputs: dict[str, Tensor]) -> Callable[[int, Tensor, Tensor], Tensor]:
        def velocity(step: int, latents: Tensor, timestep: Tensor) -> Tensor:
            batch, _, *grid = latents.shape
            condition = latents.new_zeros(batch, 5, *grid)
            return self.network(
                hidden_states=torch.cat([latents, condition], dim=1),
                timestep=timestep,
                return_dict=False,
                **inputs,
            )[0]

        return velocity


@dataclass(frozen=True)
class LoadTransformer:
    """A picklable loader for every rank."""

    folder: Path
    dtype: torch.dtype

    def __call__(self, rank: Rank) -> Transformer:
        from diffusers import HunyuanVideo15Transformer3DModel

        network = HunyuanVideo15Transformer3DModel.from_pretrained(self.folder, dtype=self.dtype)
        return Transformer(network.eval().to(rank.device))
