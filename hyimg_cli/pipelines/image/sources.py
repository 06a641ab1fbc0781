"""Source images as the network sees them: from memory, else from disk, else encoded now.

    reader thread    reads the next image ─▶ `prefetch`
    encoder thread                             └▶ encodes it while the model works
    the run itself   `encode`: there already, or encoded now

One image is encoded at a time, whichever thread asks. An image that fails ahead of its turn is
tried again in its turn, where it can only fail its own job.
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
    """Encodes each source image once; what it encodes, later runs find on disk."""

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
        # By key: seconds of what was prefetched and not asked for yet, and what the disk said.
        self._prefetch_s: dict[str, float] = {}
        self._warnings: dict[str, tuple[str, ...]] = {}

    def use(self, model: DecoderModel, model_print: str) -> None:
        """Encode by `model` from here on, whose checkpoint has the fingerprint `model_print`."""
        self._model, self._print = model, model_print
        if self._stream is not None:
            # Its weights may still be on their way in the stream that loads.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def counts(self) -> dict[str, int]:
        """How often an image was in memory, was on disk, had to be encoded."""
        return dict(self._counts)

    def clear(self) -> None:
        """Forget what is in memory, and the model."""
        self._model = None
        self._memo.clear()
        self._prefetch_s.clear()

    def prefetch(self, image: SourceImage) -> None:
        """Have an image encoded before it is asked for: in the calling thread, on a GPU on a stream
        of its own.
        """
        try:
            with self._making:
                if self._memo.find(key := self._key(image)) is None:
                    self._make(image, key, is_ahead=True)
        except Exception as error:
            # Not lost: the job that asks for the image tries again, and fails for its own reason.
            logger.info("prefetching %s failed: %r", image.digest, error)

    def encode(self, image: SourceImage, scope: str = "") -> tuple[Encoded, float]:
        """An image's rows, and the seconds that another thread spent on them meanwhile. What was
        encoded in one scope is not there in another, on disk neither.
        """
        started, key = time.perf_counter(), self._key(image, scope)
        encoded, is_new = self._memo.find(key), False
        if encoded is None:
            with self._making:
                # As the encoder thread has encoded it when it lets go, else encoded here.
                encoded = self._memo.find(key)
                if is_new := encoded is None:
                    self._prefetch_s.pop(key, None)  # prefetched, and evicted since
                    encoded = self._make(image, key, is_ahead=False)
        waited_s = time.perf_counter() - started
        prefetch_s, warnings = self._prefetch_s.pop(key, None), self._warnings.pop(key, ())
        self._counts["memory_hits"] += not is_new and prefetch_s is None
        if prefetch_s is not None:
            _belongs_here(encoded)
        told = replace(encoded, warnings=warnings) if warnings else encoded
        return told, max(0.0, (prefetch_s or 0.0) - waited_s)

    def stream_on(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of a GPU on which images are prefetched: one for good, since memory that a
        stream let go of is kept for that stream.
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
        """The key of what the model in use makes of an image."""
        model, name = self._in_use, f"{image.digest} of {scope!r}" if scope else image.digest
        # A model spread over GPUs may keep a layer on the CPU; its encoders are on the GPUs.
        device = "cuda" if "cuda" in model.device_name else "cpu"
        return source_key(name, self._print, device=device, dtype=model.dtype_name)

    def _make(self, image: SourceImage, key: str, *, is_ahead: bool) -> Encoded:
        """The rows from disk, else encoded and put there; kept in memory once they are whole."""
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
            stream.synchronize()  # this thread waits; the model's own stream goes on
        self._counts["disk_hits" if was_there else "misses"] += 1
        if warnings := self._store.take_notes():
            self._warnings[key] = warnings
        if is_ahead:
            self._prefetch_s[key] = time.perf_counter() - started
        # Last: who finds it finds what was said of it.
        return self._memo.get(key, lambda: encoded)


def _belongs_here(encoded: Encoded) -> None:
    """Keep rows of another stream from being freed while this thread's stream works with them."""
    for rows in vars(encoded.rows).values():
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))
