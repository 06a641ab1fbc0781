"""Source images as the network sees them: from memory, else from disk, else encoded now.

    reader thread    reads the next image ─▶ `prefetch`
    encoder thread                             └▶ encodes it while the model works
    the run itself   `encode`: already in memory, or encoded now

Only one thread encodes at a time. If prefetching an image fails, it is encoded again when its job
asks for it, where it can fail only that job.
"""

import logging
import time
from contextlib import nullcontext
from dataclasses import replace
from threading import Lock

import torch

from hyimg_cli.cache.disk import SOURCE_IMAGES, DiskStore
from hyimg_cli.cache.memo import Memo
from hyimg_cli.journal.keys import source_key
from hyimg_cli.media.images import SourceImage
from hyimg_cli.memory.footprint import ENCODED_BYTES
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.protocols import Encoded
from hyimg_cli.pipelines.image.stages import encoded_by
from hyimg_cli.settings.run import CacheConfig

logger = logging.getLogger(__name__)


class EncodedSources:
    """Encodes each source image once; later runs find the result on disk."""

    def __init__(self, cache: CacheConfig) -> None:
        self._model: DecoderModel | None = None
        self._print = ""
        self._memo: Memo[str, Encoded] = Memo(
            ENCODED_BYTES, lambda one: sum(rows.nbytes for rows in vars(one.rows).values())
        )
        self._store = DiskStore(cache.folder, cache.budget_bytes)
        self._counts = {"memory_hits": 0, "disk_hits": 0, "misses": 0}
        self._making = Lock()
        self._stream: torch.cuda.Stream | None = None
        # By key: seconds of a prefetch that has not been asked for yet, and warnings of the disk.
        self._prefetch_s: dict[str, float] = {}
        self._warnings: dict[str, tuple[str, ...]] = {}

    def use(self, model: DecoderModel, model_print: str) -> None:
        """Encode with `model` from now on; `model_print` is its checkpoint's fingerprint."""
        self._model, self._print = model, model_print
        if self._stream is not None:
            # Its weights may still be in transfer on the stream that loads them.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def counts(self) -> dict[str, int]:
        """Return how often an image was in memory, was on disk, or had to be encoded."""
        return dict(self._counts)

    def clear(self) -> None:
        """Drop the model and everything in memory."""
        self._model = None
        self._memo.clear()
        self._prefetch_s.clear()

    def prefetch(self, image: SourceImage) -> None:
        """Encode an image ahead of its job, in this thread; on a GPU, on a separate stream."""
        try:
            with self._making:
                if self._memo.find(key := self._key(image)) is None:
                    self._make(image, key, is_ahead=True)
        except Exception as error:
            # Nothing is lost: the job that needs the image tries again, and reports any error.
            logger.info("prefetching %s failed: %r", image.digest, error)

    def encode(self, image: SourceImage, scope: str = "") -> tuple[Encoded, float]:
        """Return an image's rows, and the seconds another thread spent on them in parallel.

        An image encoded in one scope is not found in another, not even on disk.
        """
        started, key = time.perf_counter(), self._key(image, scope)
        encoded, is_new = self._memo.find(key), False
        if encoded is None:
            with self._making:
                # Either the encoder thread has encoded it before releasing the lock, or it is
                # encoded here.
                encoded = self._memo.find(key)
                if is_new := encoded is None:
                    self._prefetch_s.pop(key, None)  # prefetched, but evicted since
                    encoded = self._make(image, key, is_ahead=False)
        waited_s = time.perf_counter() - started
        prefetch_s, warnings = self._prefetch_s.pop(key, None), self._warnings.pop(key, ())
        self._counts["memory_hits"] += not is_new and prefetch_s is None
        if prefetch_s is not None:
            _belongs_here(encoded)
        told = replace(encoded, warnings=warnings) if warnings else encoded
        return told, max(0.0, (prefetch_s or 0.0) - waited_s)

    def stream_on(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of a GPU on which images are prefetched.

        It is kept, because memory freed on a stream is reserved for that stream.
        """
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream

    @property
    def _in_use(self) -> DecoderModel:
        assert self._model is not None, "a model is in use before its images are asked for"
        return self._model

    def _key(self, image: SourceImage, scope: str = "") -> str:
        """Return the cache key of an image encoded by the current model."""
        model, name = self._in_use, f"{image.digest} of {scope!r}" if scope else image.digest
        # A model spread over GPUs may keep a layer on the CPU; its encoders are on the GPUs.
        device = "cuda" if "cuda" in model.device_name else "cpu"
        return source_key(name, self._print, device=device, dtype=model.dtype_name)

    def _make(self, image: SourceImage, key: str, *, is_ahead: bool) -> Encoded:
        """Return rows from disk, or encode and store them; keep complete rows in memory."""
        started, model = time.perf_counter(), self._in_use
        stream = None
        if is_ahead and model.device_name.startswith("cuda"):
            stream = self.stream_on(torch.device(model.device_name))
        with torch.cuda.stream(stream) if stream else nullcontext():
            encoded, was_there = self._store.read_through(
                SOURCE_IMAGES,
                key,
                lambda: encoded_by(model, image),
                pack=model.pack_source,
                unpack=lambda data: model.unpack_source(data, image.digest),
            )
        if stream is not None:
            stream.synchronize()  # this thread waits; the model's own stream continues
        self._counts["disk_hits" if was_there else "misses"] += 1
        if warnings := self._store.take_notes():
            self._warnings[key] = warnings
        if is_ahead:
            self._prefetch_s[key] = time.perf_counter() - started
        # Last, so that a thread that finds the rows also finds their warnings.
        return self._memo.get(key, lambda: encoded)


def _belongs_here(encoded: Encoded) -> None:
    """Keep rows from another stream alive while this thread's stream uses them."""
    for rows in vars(encoded.rows).values():
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))
