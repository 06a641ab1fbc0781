"""Weights of a pipeline that the library loaded, as hyimg holds them."""

from typing import Any

import torch
from torch import nn


def copy_weights(pipeline: Any) -> Any:
    """Copy a pipeline's mapped weights, for oracles to the bit; returns the pipeline.

    Products of weights that a file is mapped to depend on where they begin in the file. hyimg
    copies them.
    """
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            for tensor in (*part.parameters(), *part.buffers()):
                tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
    return pipeline
