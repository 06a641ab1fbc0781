"""Keep quantized expert matrices in the disk cache, so the next start reads at most half.

An entry is one matrix. Its key is a digest of everything that decides its bits and of the state of
its source file, so it is found without reading that file.
"""

import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hyimg_cli.cache.disk import QUANTIZED_WEIGHTS, DiskStore
from hyimg_cli.loading.readers import StoredTensor
from hyimg_cli.settings.run import CacheConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.units import bytes_text

logger = logging.getLogger(__name__)
# Increase it if the same matrix is quantized to other bits.
_FORMAT = 1
# Bytes of a matrix in its file that are sampled, at either end.
_SAMPLE_BYTES = 4096


class KeptWeights:
    """The matrices of one network, `nbytes` bytes in all, in the format `form`.

    `share`: the part of a matrix that a rank reads and keeps; empty for all of it.
    """

    def __init__(self, cache: CacheConfig, form: str, nbytes: int) -> None:
        """Keep nothing, with a warning, if the cache cannot hold all matrices."""
        budget = cache.budget_bytes
        if nbytes > budget:
            logger.warning(
                "quantized weights are not cached (%s, limit %s); give --disk-cache-mb %d",
                bytes_text(nbytes), bytes_text(budget), nbytes // 900_000 + 1,
            )  # fmt: skip
        self._store = DiskStore(cache.folder if nbytes <= budget else None, budget)
        self._form = form

    def fill(
        self,
        parts: Sequence[Tensor],
        stored: StoredTensor,
        share: str,
        quantise: Callable[[], None],
    ) -> None:
        """Fill a matrix's `parts` from the cache; on a miss, quantize and keep it."""

        def take(data: bytes) -> None:
            sizes = [part.nbytes for part in parts]
            if len(data) != sum(sizes):
                raise ValueError("of another matrix")
            every = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for part, own in zip(parts, every.split(sizes), strict=True):
                _bytes(part).copy_(own)

        def give(_: None) -> bytes:
            return b"".join(_bytes(part).cpu().numpy().data for part in parts)

        key = self._key(stored, share)
        self._store.read_through(QUANTIZED_WEIGHTS, key, quantise, pack=give, unpack=take)

    def tell(self) -> None:
        """Log faults of the cache since it was first used."""
        for note in dict.fromkeys(self._store.take_notes()):
            logger.warning("quantized weights: %s", note)

    def _key(self, stored: StoredTensor, share: str) -> str:
        status, info = os.fstat(stored.descriptor), stored.info
        ends = info.start, max(info.start, info.start + info.bytes - _SAMPLE_BYTES)
        samples = [os.pread(stored.descriptor, _SAMPLE_BYTES, end) for end in ends]
        facts = {
            "format": _FORMAT,
            "form": self._form,
            "name": stored.name,
            "stored": [info.shape, info.dtype, info.start, info.bytes],
            # Writing to the file, or replacing it, changes one of these.
            "file": [status.st_size, status.st_mtime_ns, status.st_ctime_ns],
            "samples": digest.of_bytes(b"".join(samples)),
            "share": share,
            "torch": torch.__version__,
        }
        return digest.of_json(facts)


def _bytes(part: Tensor) -> Tensor:
    return part.view(torch.uint8).view(-1)
