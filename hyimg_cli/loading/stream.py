"""A file's tensors one after the other, straight from its pages.

Nothing is read before it is asked for, and nothing is kept: who takes a tensor copies what it
needs, so that of a large checkpoint no more than one tensor is held at a time.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import refuse_unfit


def stored_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor in the order in which they lie in the file at `path`; views of it.

    Raises CheckpointError where it cannot be read.
    """
    try:
        refuse_unfit(path, os.stat(path))
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"the weights cannot be read: {error}",
            where=path.name,
            hint="download or copy the checkpoint again",
            code="checkpoint.unreadable",
        ) from None
