"""Source images as the network sees them: from memory, else from disk, else encoded now.

    reader thread    reads the next image ─▶ `prefetch`
    encoder thread                             └▶ encodes it while the model works
    the run itself   `encode`: there already, or encoded now

One image is encoded at a time, whoever asks. What goes wrong early is tried again in its turn,
where it is its own job's fault alone.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Lock

import numpy as np
import torch

from hyimg_cli.cache.disk import SOURCE_IMAGES, DiskStore
from hyimg_cli.cache.memo import Memo
from hyimg_cli.journal.keys import source_key
from hyimg_cli.media.images import SourceImage, stretch
from hyimg_cli.memory.footprint import ENCODED_BYTES
from hyimg_cli.models.protocols import Encoded, MixedModel, RoundTrips
from hyimg_cli.pipelines.image.stages import encoded_by
from hyimg_cli.settings.run import CacheConfig
from hyimg_cli.spec.job import Size

logger = logging.getLogger(__name__)
# Some dozens of round trips.
_TRIPS_BYTES = 128_000_000


class EncodedSources:
    """Encodes each source image once; what it encodes, later runs find on disk."""

    def __init__(self, cache: CacheConfig) -> None:
        self._memo: Memo[str, Encoded] = Memo(ENCODED_BYTES, _rows_bytes)
        self._store = DiskStore(cache.folder, cache.budget_bytes)
        self._disk_hits = self._misses = self._first_asks = 0
        self._held, self._making = Lock(), Lock()
        self._stream: torch.cuda.Stream | None = None
        self._prefetch_s: dict[str, float] = {}
        self._warnings: dict[str, tuple[str, ...]] = {}
        self._trips: Memo[str, tuple[np.ndarray, str]] = Memo(
            _TRIPS_BYTES, lambda one: one[0].nbytes
        )

    def encoder(self, model: MixedModel, model_print: str) -> "SourceEncoder":
        """Encoder of images for `model`, whose checkpoint has the fingerprint `model_print`."""
        if self._stream is not None:
            self._follow(self._stream)
        return SourceEncoder(self, model, model_print)

    def counts(self) -> dict[str, int]:
        """How often an image was in memory, was on disk, had to be encoded."""
        return {
            "memory_hits": self._memo.hits - self._first_asks,
            "disk_hits": self._disk_hits,
            "misses": self._misses,
        }

    def clear(self) -> None:
        """Forget what is in memory."""
        self._memo.clear()
        self._trips.clear()
        self._prefetch_s.clear()

    def prepare(self, key: str, make: Callable[[], Encoded]) -> None:
        """Have an image's rows ready before they are asked for."""
        with self._making:
            with self._held:
                if key in self._memo:
                    return
            started = time.perf_counter()
            made = self._made(key, make)
            with self._held:
                self._memo.get(key, lambda: made)
                self._prefetch_s[key] = time.perf_counter() - started

    def ask(self, key: str, make: Callable[[], Encoded]) -> tuple[Encoded, float]:
        """An image's rows, and the seconds that another thread spent on them meanwhile."""
        started = time.perf_counter()
        encoded = self._known(key) or self._waited(key, make)
        waited_s = time.perf_counter() - started
        with self._held:
            prefetch_s = self._prefetch_s.pop(key, None)
            self._first_asks += prefetch_s is not None
            warnings = self._warnings.pop(key, ())
        if prefetch_s is not None:
            _belongs_here(encoded)
        told = replace(encoded, warnings=warnings) if warnings else encoded
        return told, max(0.0, (prefetch_s or 0.0) - waited_s)

    def round_trip(
        self, model: MixedModel, image: SourceImage, size: Size
    ) -> tuple[np.ndarray, str]:
        """An image, resized to `size`, as the model's codec gives it back, once for each image; and
        a note where it cannot.
        """
        return self._trips.get(
            f"{model.card.model} {image.digest} {size}", lambda: _gone_round(model, image, size)
        )

    def stream_on(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of a GPU on which images are prefetched: one for good, since memory that a
        stream let go of is kept for that stream.
        """
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
            self._follow(self._stream)
        return self._stream

    def _follow(self, stream: torch.cuda.Stream) -> None:
        """Wait for a model's weights: they may still be on their way in the stream that loads."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))

    def stored_or(
        self, key: str, encode: Callable[[], Encoded], *, model: MixedModel, digest: str
    ) -> Encoded:
        """The rows from disk, else encoded and put there."""
        encoded, was_there = self._store.read_through(
            SOURCE_IMAGES,
            key,
            encode,
            pack=model.pack_source,
            unpack=lambda data: model.unpack_source(data, digest),
        )
        self._disk_hits += was_there
        self._misses += not was_there
        return encoded

    def _known(self, key: str) -> Encoded | None:
        with self._held:
            # A look-up of what is there is a hit; one of what is not counts when it is made.
            return self._memo.get(key, _never) if key in self._memo else None

    def _waited(self, key: str, make: Callable[[], Encoded]) -> Encoded:
        """The image as the encoder thread has encoded it when it lets go, else encoded here."""
        with self._making:
            known = self._known(key)
            if known is not None:
                return known
            self._prefetch_s.pop(key, None)  # prefetched, and evicted since
            made = self._made(key, make)
            with self._held:
                return self._memo.get(key, lambda: made)

    def _made(self, key: str, make: Callable[[], Encoded]) -> Encoded:
        made = make()
        if warnings := self._store.take_notes():
            self._warnings[key] = warnings
        return made


class SourceEncoder:
    """Encodes images for one model; called with an image, it gives rows and overlapped seconds."""

    def __init__(self, sources: EncodedSources, model: MixedModel, model_print: str) -> None:
        self._sources, self._model, self._print = sources, model, model_print

    def __call__(self, image: SourceImage) -> tuple[Encoded, float]:
        return self._sources.ask(self._key(image), lambda: self._made(image))

    def prefetch(self, image: SourceImage) -> None:
        """Encode in the calling thread; on a GPU on a stream of its own."""
        try:
            self._sources.prepare(self._key(image), lambda: self._made_aside(image))
        except Exception as error:
            # Not lost: the job that asks for the image tries again, and fails for its own reason.
            logger.info("prefetching %s failed: %r", image.digest, error)

    def _key(self, image: SourceImage) -> str:
        # A model spread over GPUs may keep a layer on the CPU; its encoders are on the GPUs.
        device = "cuda" if "cuda" in self._model.device_name else "cpu"
        return source_key(image.digest, self._print, device=device, dtype=self._model.dtype_name)

    def _made(self, image: SourceImage) -> Encoded:
        return self._sources.stored_or(
            self._key(image),
            lambda: encoded_by(self._model, image),
            model=self._model,
            digest=image.digest,
        )

    def _made_aside(self, image: SourceImage) -> Encoded:
        if not self._model.device_name.startswith("cuda"):
            return self._made(image)
        stream = self._sources.stream_on(torch.device(self._model.device_name))
        with torch.cuda.stream(stream):
            made = self._made(image)
        # This thread waits; the model's own stream goes on.
        stream.synchronize()
        return made


def suits_prefetch(model: MixedModel) -> bool:
    """True if images are best encoded while the model works: on a GPU, which leaves the CPU free.

    A model spread over several devices encodes in turn: its encoders may be on any of them.
    """
    return model.device_name.startswith("cuda") and "," not in model.device_name


def _belongs_here(encoded: Encoded) -> None:
    """Keep rows of another stream from being freed while this thread's stream works with them."""
    for rows in vars(encoded.rows).values():
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))


def _gone_round(model: MixedModel, image: SourceImage, size: Size) -> tuple[np.ndarray, str]:
    shown = stretch(image.pixels, size)
    if not isinstance(model, RoundTrips):
        return shown, ""
    try:
        return model.round_trip(shown, image.digest), ""
    except torch.OutOfMemoryError:
        return shown, "no memory for the source's round trip: the edit is compared with the source"


def _never() -> Encoded:
    raise AssertionError("what is in the memo is not made again")


def _rows_bytes(encoded: Encoded) -> int:
    return sum(rows.nbytes for rows in vars(encoded.rows).values())
