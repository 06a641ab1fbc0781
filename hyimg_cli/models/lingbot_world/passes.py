"""How passes are launched: kernel by kernel, or as CUDA graphs, one for each chunk's place.

A graph reads and writes by address, so the room of its clip stays for later ones of the same size;
launched one by one, a clip's room goes with it. A graph is held against what it was captured from,
bit for bit; where one fails, all passes are launched one by one from there on: the same kernels,
the same numbers.
"""

# Legend: B clips, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from hyimg_cli.kernels.captures import Capture, Replay
from hyimg_cli.models.lingbot_world.network import Clip, LingBotNetwork

logger = logging.getLogger(__name__)


class Passes:
    """A network's passes, launched kernel by kernel."""

    def __init__(self, network: LingBotNetwork) -> None:
        self.network = network

    def clip(
        self, text_BNM: Tensor, timesteps: Sequence[int], *, chunks: int, rows: int, columns: int
    ) -> Clip:
        """A clip's room, its constants in it."""
        return self.network.clip(text_BNM, timesteps, chunks=chunks, rows=rows, columns=columns)

    def __call__(self, clip: Clip, chunk: int, number: int, latents_BCFYX: Tensor) -> Tensor:
        """Velocity of a chunk at its pass `number`, [B, C, F, Y, X]."""
        self.network.ready(clip, number, latents_BCFYX)
        velocity: Tensor = self.network(clip, chunk)
        return velocity


class GraphPasses(Passes):
    """The same by graphs. `capture` is None where one has failed; `captured` counts them."""

    def __init__(self, network: LingBotNetwork, capture: Capture) -> None:
        super().__init__(network)
        self.capture: Capture | None = capture
        self.captured = 0
        self._clip: Clip | None = None
        self._size: tuple[int, ...] = ()
        self._replays: dict[int, Replay] = {}

    def clip(
        self, text_BNM: Tensor, timesteps: Sequence[int], *, chunks: int, rows: int, columns: int
    ) -> Clip:
        """The room of the last clip, if that was as large."""
        size = (len(text_BNM), chunks, rows, columns)
        if self._clip is None or size != self._size:
            # The old one goes before the new one comes.
            self._clip, self._replays = None, {}
            self._clip = self.network.room(size[0], chunks=chunks, rows=rows, columns=columns)
            self._size = size
        self.network.fill(self._clip, text_BNM, timesteps)
        self._clip.passes = 0
        return self._clip

    def __call__(self, clip: Clip, chunk: int, number: int, latents_BCFYX: Tensor) -> Tensor:
        self.network.ready(clip, number, latents_BCFYX)
        if chunk not in self._replays and self.capture is not None:
            self._replays[chunk] = self._proven(clip, chunk, self.capture)
        replay = self._replays.get(chunk)
        velocity: Tensor = self.network(clip, chunk) if replay is None else replay()
        return velocity

    def _proven(self, clip: Clip, chunk: int, capture: Capture) -> Replay:
        """A chunk's graph, or the plain way. K/V are written to the same slots each time."""

        def compute() -> Tensor:
            velocity: Tensor = self.network(clip, chunk)
            return velocity

        try:
            replay = capture(compute)
            if not torch.equal(compute(), replay()):
                raise RuntimeError("its replay differs from what it was captured from")
        except Exception as error:
            self.capture = None
            reason = str(error).split("\n")[0]
            logger.warning("no CUDA graphs of passes, which are launched one by one: %s", reason)
            return compute
        self.captured += 1
        return replay
