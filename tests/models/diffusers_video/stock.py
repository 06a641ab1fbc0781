"""HunyuanVideo-1.5 by diffusers' own forward, padded and masked as in its pipeline: the
reference for hyimg's forward through the same modules.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width
from typing import Any

from torch import Tensor

from hyimg_cli.models.diffusers_video.encoders import GLYPH, TEXT
from hyimg_cli.models.diffusers_video.hunyuan_video15 import Forward, HunyuanVideo15
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.record import HUNYUAN_GLYPH_TOKENS, HUNYUAN_MAX_TOKENS
from hyimg_cli.models.latent import PromptEmbedding

IMAGE_TOKENS = 729


def take_stock_forward(model: DiffusersVideo) -> DiffusersVideo:
    """The model, its networks unread, with the library's forward and its processors of attention;
    Wan's has no other.
    """
    if isinstance(model, HunyuanVideo15):
        model.prepare = lambda network: None  # type: ignore[method-assign]
        model.new_forward = stock_forward  # type: ignore[method-assign]
    return model


def stock_forward(
    network: Any, embedding: PromptEmbedding, noise_1CFYX: Tensor, tokens_1NM: Tensor | None
) -> Forward:
    """The library's own forward, its inputs padded and masked as the pipeline gives them."""
    config = network.config
    text_1NM, text_mask = _padded(
        embedding, TEXT, HUNYUAN_MAX_TOKENS, config.text_embed_dim, noise_1CFYX
    )
    glyph_1NM, glyph_mask = _padded(
        embedding, GLYPH, HUNYUAN_GLYPH_TOKENS, config.text_embed_2_dim, noise_1CFYX
    )
    image_1NM = noise_1CFYX.new_zeros(1, IMAGE_TOKENS, config.image_embed_dim)
    if tokens_1NM is not None:
        image_1NM = tokens_1NM.to(noise_1CFYX)

    def forward(model_input: Tensor, timestep: Tensor, behind: Tensor | None) -> Tensor:
        velocity: Tensor = network(
            hidden_states=model_input,
            timestep=timestep,
            timestep_r=behind,
            encoder_hidden_states=text_1NM,
            encoder_attention_mask=text_mask,
            encoder_hidden_states_2=glyph_1NM,
            encoder_attention_mask_2=glyph_mask,
            image_embeds=image_1NM,
            return_dict=False,
        )[0]
        return velocity

    return forward


def _padded(
    embedding: PromptEmbedding, name: str, length: int, width: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """A stream's tokens with zeros behind them, and its mask, as `encode_prompt` returns them."""
    rows_1NM, mask_1N = like.new_zeros(1, length, width), like.new_zeros(1, length)
    if name in embedding.tensors:
        valid = embedding.tensors[name]
        rows_1NM[0, : len(valid)] = valid.to(like)
        mask_1N[0, : len(valid)] = 1
    return rows_1NM, mask_1N
