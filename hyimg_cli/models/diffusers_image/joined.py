"""Jobs whose steps are one forward: the states of their blocks, joined row by row.

Each job is prepared alone, with its own noise and conditions, so the library's blocks get a batch
with the rows that each job has alone. Only jobs whose tensors have equal shapes are joined: nothing
is filled up, and no mask is added.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import Tensor

from hyimg_cli.models.latent import PromptEmbedding


def form_of(embeddings: Mapping[Any, PromptEmbedding]) -> Hashable:
    """Return what must be equal between the encoded conditions of jobs that are denoised together.

    That is each tensor's shape, a size that was read from a picture, and whether a mask masks
    anything: the blocks leave out one that does not.
    """
    return tuple(
        (condition.stage, name, *tensor.shape, *_facts(name, tensor))
        for condition, made in embeddings.items()
        for name, tensor in sorted(made.tensors.items())
    )


def joined_state(states: Sequence[PipelineState]) -> PipelineState:
    """Return the state of a batch; entries that are not rows are those of the first job."""
    first, made = states[0], PipelineState()
    made.kwargs_mapping = first.kwargs_mapping
    for name, value in first.values.items():
        every: list[Any] = [one.values[name] for one in states]
        if isinstance(value, Tensor) and value.ndim and len(value) == 1:
            made.values[name] = torch.cat(every)
        elif isinstance(value, list):
            made.values[name] = [item for one in every for item in one]
        else:
            made.values[name] = value
    return made


def _facts(name: str, tensor: Tensor) -> tuple[Hashable, ...]:
    if tensor.ndim == 0:
        return (tensor.item(),)
    return (bool(tensor.all()),) if name.endswith("mask") else ()
