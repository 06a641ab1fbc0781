"""The embedded image model on every rank of a tensor-parallel group, and one job's forwards."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.diffusion.guidance import guided
from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.models.hunyuan_image3.sharded import shard
from hyimg_cli.models.hunyuan_image3.weights import load
from hyimg_cli.models.protocols import Context, LivePicture
from hyimg_cli.parallel.ranks import Rank
from hyimg_cli.parallel.tensor import Share
from hyimg_cli.spec.job import ImageJob

STEPS = 4


@dataclass(frozen=True)
class LoadSharded:
    """Loads the checkpoint on a rank and keeps the rank's share of its layers."""

    dtype: torch.dtype
    ranks: int

    def __call__(self, rank: Rank) -> HunyuanImage3:
        network = load(registry.resolve_model(registry.EMBEDDED), dtype=self.dtype)
        shard(network, Share.of(rank, self.ranks))
        return HunyuanImage3(network, registry.prompter(registry.EMBEDDED))


def forwards(rank: Rank, job: ImageJob) -> dict[str, Any]:
    """Task: prefill, decode some tokens, denoise with CFG, decode; what came out, as arrays."""
    model: HunyuanImage3 = rank.parts["model"]
    found = {"logits": _written(model, job), **_drawn(model, job)}
    sizes = {name: p.numel() for name, p in model.network.model.layers.named_parameters()}
    arrays = {name: value.float().numpy() for name, value in found.items()}
    return arrays | {"layer_parameters": sum(sizes.values())}


def _written(model: HunyuanImage3, job: ImageJob) -> Tensor:
    opening = model.opening(job, [])
    assert opening is not None
    buffer = model.new_buffer(opening.capacity)
    ids = opening.layout.ids
    hidden_M = model.prefill(opening.layout, ids, [], buffer, opening.stop)
    context = Context(list(ids[: opening.stop]), buffer, hidden_M)
    seen = [model.text_logits([context])]
    for token in (5, 40, 7, 99):
        model.feed([(context, [token])])
        seen.append(model.text_logits([context]))
    return torch.cat(seen)


def _drawn(model: HunyuanImage3, job: ImageJob) -> dict[str, Tensor]:
    bucket, _ = model.bucket(job, None)
    layout = model.layout(job, [], None, bucket)
    branches = []
    for ids in (layout.ids, layout.unconditional_ids):
        buffer = model.new_buffer(len(ids))
        model.prefill(layout, ids, [], buffer, layout.live_start)
        branches.append(model.branch(layout, buffer))
    latents = model.initial_latents(bucket, job.seed)
    velocities = []
    for step in Schedule(STEPS, 3.0).steps():
        picture = LivePicture(latents, step, job.guidance_scale, branches)
        velocities.append(model.velocities([picture])[0])
        latents = step.advance(latents, guided(velocities[-1], [job.guidance_scale]))
    return {"velocities": torch.stack(velocities), "pixels": model.decode_latents(latents)}
