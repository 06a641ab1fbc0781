"""Run the product's network on padded batches with gradients: same modules, same weights.

Only the bookkeeping differs from the product's own forward: a dense mask instead of a KV buffer, a
timestep per row and copy instead of one, and a loss for the router's balance.

Shapes: B row · S token · K copy · N image token · M model width · H heads · D head width · C Y X
latents · E expert · V vocabulary · P patch values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.moe import Mlp, Moe
from hyimg_cli.models.hunyuan_image3.rope import rope
from hyimg_cli.models.hunyuan_image3.transformer import Attention, DecoderLayer
from tiny_world.architecture import LATENT_GRID, PATCH_PX, VISION_GRID
from tiny_world.batches import Batch
from tiny_world.device import device_of, moved


@dataclass(frozen=True)
class Pictures:
    """Latents of a batch, timesteps in 0..1000; latents and uint8 pixels of sources, if any."""

    noisy_BKCYX: Tensor
    timesteps_BK: Tensor
    source_latents_BCYX: Tensor | None = None
    source_pixels_BCYX: Tensor | None = None


@dataclass(frozen=True)
class Outputs:
    """Velocity [B, K, C, Y, X], the last residual stream [B, S, M], and the balance loss."""

    velocity_BKCYX: Tensor
    hidden_BSM: Tensor
    balance: Tensor


def train_forward(network: HunyuanImage3ForCausalMM, batch: Batch, pictures: Pictures) -> Outputs:
    """Return what the product computes for each row and copy, all at once, on its device."""
    batch, pictures = (moved(data, device_of(network)) for data in (batch, pictures))
    x_BSM = embedded(network, batch, pictures)
    angles = rope(
        batch.positions_BS2.flatten(0, 1),
        head_dim=network.arch.head_dim,
        theta=network.arch.rope_theta,
    )
    balance = torch.zeros((), device=x_BSM.device)
    for layer in network.model.layers:
        x_BSM, unbalance = _layer(layer, x_BSM, angles, batch.visible_BSS)
        balance = balance + unbalance
    velocity_BKCYX = _velocity(network, x_BSM, batch, pictures.timesteps_BK)
    return Outputs(velocity_BKCYX, x_BSM, balance / len(network.model.layers))


def embedded(network: HunyuanImage3ForCausalMM, batch: Batch, pictures: Pictures) -> Tensor:
    """Return token rows [B, S, M], with pictures and timesteps in their slots."""
    x_BSM: Tensor = network.model.wte(batch.ids_BS)
    flat_T = pictures.timesteps_BK.flatten()
    tokens_TNM = network.patch_embed(pictures.noisy_BKCYX.flatten(0, 1), network.time_embed(flat_T))
    x_BSM = _placed(x_BSM, batch.timesteps_BK, network.timestep_emb(flat_T))
    x_BSM = _placed(x_BSM, batch.image_BKN, tokens_TNM)
    if pictures.source_latents_BCYX is None:
        return x_BSM
    assert batch.source_timestep_B is not None, "a source picture has its slots"
    assert batch.source_vae_BN is not None, "a source picture has its slots"
    assert batch.source_vit_BN is not None, "a source picture has its slots"
    assert pictures.source_pixels_BCYX is not None, "a source has pixels as well as latents"
    zero_B = torch.zeros(len(x_BSM), device=x_BSM.device)
    vae_BNM = network.patch_embed(pictures.source_latents_BCYX, network.time_embed(zero_B))
    x_BSM = _placed(x_BSM, batch.source_timestep_B, network.timestep_emb(zero_B))
    x_BSM = _placed(x_BSM, batch.source_vae_BN, vae_BNM)
    return _placed(
        x_BSM, batch.source_vit_BN, source_features(network, pictures.source_pixels_BCYX)
    )


def source_features(network: HunyuanImage3ForCausalMM, pixels_BCYX: Tensor) -> Tensor:
    """Return ViT rows [B, N, M] of uint8 pictures that fill the patch grid exactly."""
    count = len(pixels_BCYX)
    features_BNM = network.vision_model(
        patches(pixels_BCYX),
        torch.ones(count, VISION_GRID**2, dtype=torch.int32),
        torch.tensor([[VISION_GRID, VISION_GRID]]).repeat(count, 1),
    )
    rows_BNM: Tensor = network.vision_aligner(features_BNM)
    return rows_BNM


def patches(pixels_BCYX: Tensor) -> Tensor:
    """Return normalised patches [B, N, P], as the NaFlex processor makes them.

    In the order row, column, channel.
    """
    unit_BCYX = pixels_BCYX.float() / 127.5 - 1
    split = unit_BCYX.unflatten(3, (VISION_GRID, PATCH_PX)).unflatten(2, (VISION_GRID, PATCH_PX))
    rows_BNP: Tensor = split.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    return rows_BNP


def text_loss(network: HunyuanImage3ForCausalMM, outputs: Outputs, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the tokens to be learnt."""
    next_ids_BS = batch.next_ids_BS.to(outputs.hidden_BSM.device)
    is_learnt_BS = next_ids_BS >= 0
    logits_TV = network.lm_head(network.model.ln_f(outputs.hidden_BSM[is_learnt_BS]))
    return functional.cross_entropy(logits_TV.float(), next_ids_BS[is_learnt_BS])


def _layer(
    layer: DecoderLayer, x_BSM: Tensor, angles: Tensor, visible_BSS: Tensor
) -> tuple[Tensor, Tensor]:
    seen_BSM = _attention(layer.self_attn, layer.input_layernorm(x_BSM), angles, visible_BSS)
    x_BSM = x_BSM + seen_BSM
    normed_TM = layer.post_attention_layernorm(x_BSM).flatten(0, 1)
    assert layer.mlp.shared_mlp is not None, "this architecture has a shared expert"
    logits_TE, weight_TK, index_TK = layer.mlp.gate(normed_TM)
    weight_TE = torch.zeros_like(logits_TE).scatter(1, index_TK, weight_TK)
    mixed_TM = layer.mlp.shared_mlp(normed_TM) + _routed(layer.mlp, normed_TM, weight_TE)
    return x_BSM + mixed_TM.unflatten(0, x_BSM.shape[:2]), _unbalance(logits_TE, index_TK)


def _attention(attention: Attention, x_BSM: Tensor, angles: Tensor, visible_BSS: Tensor) -> Tensor:
    rows = x_BSM.shape[:2]
    q_THD, k_THD, v_THD = attention.project(x_BSM.flatten(0, 1), angles)
    q_BHSD, k_BHSD, v_BHSD = (
        x_THD.unflatten(0, rows).transpose(1, 2) for x_THD in (q_THD, k_THD, v_THD)
    )
    k_BHSD, v_BHSD = (x.repeat_interleave(attention.group, dim=1) for x in (k_BHSD, v_BHSD))
    # Written out: the fused kernel's backward pass takes a third of the whole step on a CPU.
    scores_BHSS = q_BHSD @ (k_BHSD * attention.head_dim**-0.5).transpose(2, 3)
    weights_BHSS = scores_BHSS.masked_fill(~visible_BSS[:, None], -1e4).softmax(dim=-1)
    out_BHSD = weights_BHSS.to(v_BHSD.dtype) @ v_BHSD
    projected: Tensor = attention.o_proj(out_BHSD.transpose(1, 2).flatten(2))
    return projected


def _routed(moe: Moe, x_TM: Tensor, weight_TE: Tensor) -> Tensor:
    """Compute every expert on every token, with weight 0 if not chosen: exact, in one shape.

    Gathering each expert's tokens is less arithmetic, but a CPU prepares a new kernel for every new
    shape, which takes longer.
    """
    experts = [expert for expert in moe.experts if isinstance(expert, Mlp)]
    fused = torch.cat([expert.gate_and_up_proj.weight for expert in experts])
    down = torch.cat([expert.down_proj.weight for expert in experts], dim=1)
    wide_TEI = functional.linear(x_TM, fused).unflatten(1, (len(experts), -1))
    up_TEI, gate_TEI = wide_TEI.chunk(2, dim=-1)
    inner_TEI = up_TEI * functional.silu(gate_TEI) * weight_TE[..., None].to(up_TEI.dtype)
    return functional.linear(inner_TEI.flatten(1), down)


def _unbalance(logits_TE: Tensor, index_TK: Tensor) -> Tensor:
    """Return 1 if every expert gets its share, more otherwise.

    Source: Switch Transformer, eq. 4.
    """
    experts = logits_TE.shape[1]
    load_E = torch.bincount(index_TK.flatten(), minlength=experts) / index_TK.numel()
    return experts * (load_E * logits_TE.softmax(dim=-1).mean(dim=0)).sum()


def _velocity(
    network: HunyuanImage3ForCausalMM, x_BSM: Tensor, batch: Batch, timesteps_BK: Tensor
) -> Tensor:
    rows_B11 = torch.arange(len(x_BSM), device=x_BSM.device)[:, None, None]
    tokens_TNM = x_BSM[rows_B11, batch.image_BKN].flatten(0, 1)
    embedding_TM = network.time_embed_2(timesteps_BK.flatten())
    velocity = network.final_layer(tokens_TNM, embedding_TM, LATENT_GRID)
    velocity_BKCYX: Tensor = velocity.float().unflatten(0, timesteps_BK.shape)
    return velocity_BKCYX


def _placed(x_BSM: Tensor, slots_B: Tensor, rows: Tensor) -> Tensor:
    """Return a copy of `x` with `rows` written to each row's `slots` ([B, ...])."""
    rows_BNM = rows.reshape(len(x_BSM), -1, x_BSM.shape[-1]).to(x_BSM.dtype)
    index_BNM = slots_B.reshape(len(x_BSM), -1, 1).expand_as(rows_BNM)
    return x_BSM.scatter(1, index_BNM, rows_BNM)
