"""A job's film, encoded while it is decoded: no more than two pieces of frames are held.

    decode    piece 1 ▸ piece 2 ▸ piece 3 ▸ ..         in the run's own thread
    encode              piece 1 ▸ piece 2 ▸ ..         in another; the decode waits for it
    write                                   tail ▸ name, while the next job is denoised

It stands under a temporary name until it is written. A decode that begins again has a new one.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyimg_cli.files import remove, replace_file, storage_error
from hyimg_cli.settings.run import DecodeTiles

if TYPE_CHECKING:
    from hyimg_cli.media.video import VideoWriter, WrittenVideo


@dataclass(eq=False)
class Film:
    """A film on its way to `path`; `text`: of its sidecar, None without one; `shots`: the folder of
    its frames as pictures, None without one.
    """

    path: Path
    text: str | None
    shots: Path | None
    writer: "VideoWriter"

    def write(self) -> "WrittenVideo":
        """The sidecar, the frames, then the film: whoever sees the film sees the others."""
        with closing(self.writer):
            try:
                # What an earlier film of this name has beside it would tell of another job.
                for suffix in (".json", ".frames"):
                    remove(self.path.with_suffix(suffix))
                if self.text is not None:
                    replace_file(self.path.with_suffix(".json"), f"{self.text}\n".encode())
            except OSError as error:
                raise storage_error(error, self.path.parent) from error
            return self.writer.finish()

    def take(self, pieces: Iterator[np.ndarray]) -> float:
        """Encode each piece while the next one is decoded; seconds that it took. Where either fails
        nothing is left of the film.
        """
        seconds, adding = 0.0, Future[float]()
        adding.set_result(0.0)
        try:
            with ThreadPoolExecutor(1) as thread:
                for piece in pieces:
                    seconds += adding.result()
                    adding = thread.submit(self._add, piece)
                return seconds + adding.result()
        except BaseException:
            self.writer.close()
            raise

    def _add(self, piece: np.ndarray) -> float:
        started = time.perf_counter()
        self.writer.add(piece)
        return time.perf_counter() - started


# Given the tiles of a decode that was short of memory, None for the model's own.
BeginFilm = Callable[[DecodeTiles | None], Film]
