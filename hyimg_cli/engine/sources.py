"""Source images as the network sees them: from memory, else from disk, else encoded now."""

from dataclasses import replace

from hyimg_cli.engine.image import EncodeSource
from hyimg_cli.engine.keys import source_key
from hyimg_cli.media.images import SourceImage
from hyimg_cli.models.protocols import Encoded, MixedModel
from hyimg_cli.spec.run import CacheConfig
from hyimg_cli.store.disk import SOURCE_IMAGES, DiskStore
from hyimg_cli.store.memo import Memo

_MEMO_BYTES = 2_000_000_000


class Sources:
    """Encodes each source image once; what it encodes, later runs find on disk."""

    def __init__(self, cache: CacheConfig) -> None:
        self._memo: Memo[str, Encoded] = Memo(_MEMO_BYTES, _rows_bytes)
        self._store = DiskStore(cache.folder, cache.budget_bytes)
        self._disk_hits = self._misses = 0

    def encoder(self, model: MixedModel, model_print: str) -> EncodeSource:
        """What encodes an image for `model`, whose checkpoint has the fingerprint `model_print`."""
        # A model spread over GPUs may keep a layer on the CPU; its encoders are on the GPUs.
        device = "cuda" if "cuda" in model.device_name else "cpu"
        dtype = model.dtype_name

        def encode(image: SourceImage) -> Encoded:
            key = source_key(image.digest, model_print, device=device, dtype=dtype)
            encoded = self._memo.get(key, lambda: self._stored_or_made(key, model, image))
            notes = self._store.take_notes()
            return replace(encoded, notes=(*encoded.notes, *notes)) if notes else encoded

        return encode

    def counts(self) -> dict[str, int]:
        """How often an image was in memory, was on disk, had to be encoded."""
        return {
            "memory_hits": self._memo.hits,
            "disk_hits": self._disk_hits,
            "misses": self._misses,
        }

    def clear(self) -> None:
        """Forget what is in memory."""
        self._memo.clear()

    def _stored_or_made(self, key: str, model: MixedModel, image: SourceImage) -> Encoded:
        stored = self._stored(key, model, image.digest)
        if stored is not None:
            self._disk_hits += 1
            return stored
        self._misses += 1
        encoded = model.encode_source(image.pixels, image.digest)
        if self._store.takes_more:
            self._store.write(SOURCE_IMAGES, key, model.pack_source(encoded))
        return encoded

    def _stored(self, key: str, model: MixedModel, digest: str) -> Encoded | None:
        data = self._store.read(SOURCE_IMAGES, key)
        if data is None:
            return None
        try:
            return model.unpack_source(data, digest)
        except ValueError:
            self._store.discard(SOURCE_IMAGES, key)
            return None


def _rows_bytes(encoded: Encoded) -> int:
    return sum(rows.nbytes for rows in vars(encoded.rows).values())
