"""One job's forwards through a model, wherever its layers are: what is compared across ranks."""

from typing import Any

import torch
from torch import Tensor

from hyimg_cli.diffusion.guidance import guided
from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.models.hunyuan_image3.ranked import PART, RankLayers
from hyimg_cli.models.protocols import Context, DenoiseInput, GeneratedText, Prefill
from hyimg_cli.parallel.ranks import Rank
from hyimg_cli.spec.job import ImageJob

STEPS = 4
TOKENS = (5, 40, 7, 99)


def forwards(model: HunyuanImage3, job: ImageJob) -> dict[str, Tensor]:
    """Prefill, decode some tokens, denoise with CFG, decode latents: what came out."""
    found = {"logits": written(model, job), **drawn(model, job)}
    return {name: value.float() for name, value in found.items()}


def written(model: HunyuanImage3, job: ImageJob, tree: Any = None) -> Tensor:
    """Logits behind the prompt and behind each of some tokens; the prompt's K/V in `tree`."""
    opening = model.opening(job, [])
    assert opening is not None
    buffer = model.new_buffer()
    ids = opening.ids
    segments = model.segments(opening.layout, ids, [], len(ids) - 1)
    tree = KVTree(0) if tree is None else tree
    with tree.pinned(tree.match("", segments)) as prefix:
        for payload in prefix.payloads:
            buffer.extend(payload)
    hidden_M = model.prefill([Prefill(opening.layout, ids, [], buffer, len(ids))])[0]
    tree.insert("", segments, buffer.rows)
    context = Context(list(ids), buffer, hidden_M)
    seen = [model.text_logits([context])]
    for token in TOKENS:
        model.feed([(context, [token])])
        seen.append(model.text_logits([context]))
    return torch.cat(seen)


def drawn(model: HunyuanImage3, job: ImageJob) -> dict[str, Tensor]:
    """Velocities of every step and the picture; the second branch begins as a copy of the first."""
    canvas = model.canvas(job, [], GeneratedText())
    bucket, layout = canvas.bucket, canvas.branches[0].layout
    rows = (layout.ids, layout.unconditional_ids)
    common = next(n for n, (a, b) in enumerate(zip(*rows, strict=True)) if a != b)
    first = model.new_buffer()
    model.prefill([Prefill(layout, layout.ids, [], first, layout.live_start)])
    second = model.new_buffer()
    second.share_prefix(first, common)
    model.prefill([Prefill(layout, layout.unconditional_ids, [], second, layout.live_start)])
    branches = [model.branch(layout, buffer) for buffer in (first, second)]
    latents = model.initial_latents(bucket, job.seed)
    velocities = []
    for step in Schedule(STEPS, 3.0).steps():
        picture = DenoiseInput(latents, step, job.guidance_scale, branches)
        velocities.append(model.velocities([picture])[0])
        latents = step.advance(latents, guided(velocities[-1], [job.guidance_scale]))
    return {"velocities": torch.stack(velocities), "pixels": model.decode_latents(latents)}


def held(rank: Rank) -> tuple[int, int]:
    """Task: bytes of weights on a rank above 0, and the slots that it has."""
    follower: RankLayers = rank.parts[PART]
    weights = [p for p in follower.layers.parameters() if not p.is_meta]
    return sum(p.nbytes for p in weights), follower.storage.slots


def rows_at(rank: Rank, slots: list[int]) -> list[Tensor]:
    """Task: the keys of every layer in some slots of a rank above 0."""
    follower: RankLayers = rank.parts[PART]
    return [keys_SKD[slots] for keys_SKD in follower.storage.keys_SKD]
