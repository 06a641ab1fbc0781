"""Four ranks for all tests of this room: starting processes is most of what they cost."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import tiny_vaes
import torch

from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.pipelines import ranks as ranks_of

WRITERS = {
    "hunyuan-video": tiny_vaes.write_hunyuan_video,
    "wan": tiny_vaes.write_wan,
    "wan-patches": tiny_vaes.write_wan_patches,
}


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=120) as ranks:
        # A model of another room, with ranks of its own in this process, may take the turn.
        ranks_of._POOLS.add(ranks)
        yield ranks


@pytest.fixture(scope="session")
def vae_loader(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tiny_vaes.VaeLoader]:
    """Loader of a tiny autoencoder on disk, by kind and dtype."""

    @cache
    def write(kind: str, dtype: torch.dtype) -> Path:
        return WRITERS[kind](tmp_path_factory.mktemp("vae") / "vae", dtype)

    return lambda kind, dtype=torch.float32: tiny_vaes.VaeLoader(write(kind, dtype), dtype)
