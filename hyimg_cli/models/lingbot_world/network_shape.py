"""Numbers of the transformer; no torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkShape:
    """Numbers of a configuration, by its keys. `num_frames_per_block`: latent frames that are
    denoised together, a chunk.
    """

    num_attention_heads: int = 40
    attention_head_dim: int = 128
    num_layers: int = 40
    ffn_dim: int = 13824
    text_dim: int = 4096
    text_len: int = 512
    freq_dim: int = 256
    in_channels: int = 36
    out_channels: int = 16
    eps: float = 1e-6
    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_frames_per_block: int = 3
    rope_max_seq_len: int = 1024

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    def chunk_tokens(self, rows: int, columns: int) -> int:
        """Tokens of a chunk with so many latent rows and columns."""
        return self.num_frames_per_block * rows * columns // math.prod(self.patch_size)
