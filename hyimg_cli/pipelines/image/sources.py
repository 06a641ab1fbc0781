"""Source images as the network sees them.

    reader thread    reads the next image ─▶ `prefetch`
    encoder thread                             └▶ encodes it while the model works
    the run itself   `encode`: already in memory, or encoded now

If prefetching an image fails, it is encoded again when its job asks for it, where it can fail only
that job.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from hyimg_cli.cache.disk import SOURCE_IMAGES
from hyimg_cli.journal.keys import source_key
from hyimg_cli.media.images import SourceImage
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.protocols import Encoded
from hyimg_cli.pipelines.encoded_inputs import EncodedInputs, Encoding
from hyimg_cli.pipelines.image.stages import encoded_by
from hyimg_cli.settings.run import CacheConfig

logger = logging.getLogger(__name__)


class EncodedSources:
    """Encodes each source image once, on a GPU also beside the model."""

    def __init__(self, cache: CacheConfig) -> None:
        self._model: DecoderModel | None = None
        self._print = ""
        self._inputs: EncodedInputs[Encoded] = EncodedInputs(
            cache, SOURCE_IMAGES, lambda one: sum(rows.nbytes for rows in vars(one.rows).values())
        )
        self._stream: torch.cuda.Stream | None = None
        # By key: seconds of a prefetch that has not been asked for yet.
        self._prefetch_s: dict[str, float] = {}

    def use(self, model: DecoderModel, model_print: str) -> None:
        """Encode with `model` from now on; `model_print` is its checkpoint's fingerprint."""
        self._model, self._print = model, model_print
        if self._stream is not None:
            # Its weights may still be in transfer on the stream that loads them.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def counts(self) -> dict[str, int]:
        """Return how often an image was in memory, was on disk, or had to be encoded."""
        return {**self._inputs.counts}

    def clear(self) -> None:
        """Drop the model and everything in memory."""
        self._model = None
        self._inputs.clear()
        self._prefetch_s.clear()

    def prefetch(self, image: SourceImage) -> None:
        """Encode an image ahead of its job, in this thread; on a GPU, on a separate stream."""
        try:
            encoding = self._encoding(image)
            self._inputs.find(encoding, self._ahead(encoding.key))
        except Exception as error:
            # Nothing is lost: the job that needs the image tries again, and reports any error.
            logger.info("prefetching %s failed: %r", image.digest, error)

    def encode(self, image: SourceImage, scope: str = "") -> tuple[Encoded, float]:
        """Return an image's rows, and the seconds another thread spent on them in parallel.

        An image encoded in one scope is not found in another, not even on disk.
        """
        started, encoding = time.perf_counter(), self._encoding(image).within(scope)
        encoded, place = self._inputs.find(encoding)
        waited_s = time.perf_counter() - started
        prefetch_s = self._prefetch_s.pop(encoding.key, None)
        if place != "memory_hits":
            prefetch_s = None  # prefetched, but evicted since
        elif prefetch_s is None:
            self._inputs.counts["memory_hits"] += 1
        else:
            _belongs_here(encoded)
        if warnings := self._inputs.take_warnings(encoding):
            encoded = replace(encoded, warnings=warnings)
        return encoded, max(0.0, (prefetch_s or 0.0) - waited_s)

    def stream_on(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of a GPU on which images are prefetched.

        It is kept, because memory freed on a stream is reserved for that stream.
        """
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream

    def _encoding(self, image: SourceImage) -> Encoding[Encoded]:
        """Return how the model in use encodes an image."""
        model = self._in_use
        # A model spread over GPUs may keep a layer on the CPU; its encoders are on the GPUs.
        device = "cuda" if "cuda" in model.device_name else "cpu"
        return Encoding(
            source_key(image.digest, self._print, device=device, dtype=model.dtype_name),
            lambda: encoded_by(model, image),
            model.pack_source,
            lambda data: model.unpack_source(data, image.digest),
        )

    @contextmanager
    def _ahead(self, key: str) -> Iterator[None]:
        """Encode beside the model's own work, and note the seconds it takes."""
        started, model = time.perf_counter(), self._in_use
        stream = None
        if model.device_name.startswith("cuda"):
            stream = self.stream_on(torch.device(model.device_name))
        with torch.cuda.stream(stream) if stream else nullcontext():
            yield
        if stream is not None:
            stream.synchronize()  # this thread waits; the model's own stream continues
        self._prefetch_s[key] = time.perf_counter() - started

    @property
    def _in_use(self) -> DecoderModel:
        assert self._model is not None, "a model is in use before its images are asked for"
        return self._model


def _belongs_here(encoded: Encoded) -> None:
    """Keep rows from another stream alive while this thread's stream uses them."""
    for rows in vars(encoded.rows).values():
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))
