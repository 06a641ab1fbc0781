"""Numbers of the transformer; no torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkShape:
    """Numbers of a configuration. `chunk`: latent frames that are denoised together."""

    heads: int = 40
    head_dim: int = 128
    layers: int = 40
    ffn: int = 13824
    text_dim: int = 4096
    text_len: int = 512
    freq_dim: int = 256
    taken: int = 36
    made: int = 16
    eps: float = 1e-6
    patch: tuple[int, int, int] = (1, 2, 2)
    chunk: int = 3
    positions: int = 1024

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def chunk_tokens(self, rows: int, columns: int) -> int:
        """Tokens of a chunk with so many latent rows and columns."""
        return self.chunk * rows * columns // math.prod(self.patch)
