"""The decoder layers split over ranks: attention by heads, every expert by its inner width.

    attention   a rank has some kv heads with their query heads; with more ranks than kv heads it
                has one kv head, which others have too, and some of that head's query heads
    experts     a rank has its share of the inner width of all experts, the shared one too: the
                same work on every rank, whichever experts a row chooses

Two sums over ranks a layer. Router, norms, embeddings, heads, ViT and VAE are whole on every rank.
"""

import torch
from torch import Tensor, nn

from hyimg_cli.errors import UsageError
from hyimg_cli.models.hunyuan_image3.attention import Attention
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.moe import Mlp, Moe
from hyimg_cli.models.hunyuan_image3.transformer import DecoderLayer
from hyimg_cli.parallel.tensor import Share, Summed, kept_columns, kept_rows


def shard(network: HunyuanImage3ForCausalMM, share: Share) -> None:
    """Keep this share of every decoder layer, in place; the rest of the weights is let go.

    Afterwards every rank of the group must make the same calls. Raises UsageError where heads or
    experts cannot be split so, or are quantised.
    """
    refuse_uneven(network.arch, share.count)
    if share.count == 1:
        return
    if any(not isinstance(expert, Mlp) for expert in network.model.layers[0].mlp.experts):
        raise UsageError(
            "quantised experts cannot be split over ranks",
            where="--tensor-parallel-size",
            hint="leave --quantization out, or run on one rank",
            code="usage.tensor-parallel",
        )
    for layer in network.model.layers:
        assert isinstance(layer, DecoderLayer), "the backbone is made of decoder layers"
        _shard_attention(layer.self_attn, share)
        _shard_experts(layer.mlp, share)
        layer.mlp = Summed(layer.mlp, share.count)  # type: ignore[assignment]


def refuse_uneven(arch: Architecture, ranks: int) -> None:
    """Passes rank counts over which heads and experts can be split. Raises UsageError."""
    kv_heads, group = arch.num_key_value_heads, arch.heads_per_kv_head
    has_heads = kv_heads % ranks == 0 or (ranks % kv_heads == 0 and ranks // kv_heads <= group)
    widths = {width for width in arch.moe_intermediate_size if width % ranks}
    if not has_heads or widths:
        what = f"{kv_heads} kv heads of {group} query heads" if not has_heads else f"{widths}"
        raise UsageError(
            f"{what} cannot be split over {ranks} ranks",
            where="--tensor-parallel-size",
            hint="take a divisor of the kv heads (8 in released checkpoints)",
            code="usage.tensor-parallel",
        )


def _shard_attention(attention: Attention, share: Share) -> None:
    """Rows of the fused projection lie kv head by kv head: its query heads, then k, then v."""
    heads = torch.arange(attention.heads).view(attention.kv_heads, attention.group)
    kv_of_rank, queries_of_rank = _heads(attention, share)
    kept = heads[kv_of_rank, queries_of_rank]
    kv_heads, group = kept.shape
    rows = torch.arange(attention.qkv_proj.out_features).view(
        attention.kv_heads, attention.group + 2, attention.head_dim
    )[kv_of_rank]
    fused = torch.cat([rows[:, queries_of_rank], rows[:, attention.group :]], dim=1)
    columns = torch.arange(attention.o_proj.in_features).view(-1, attention.head_dim)
    attention.qkv_proj = kept_rows(attention.qkv_proj, fused.flatten())
    attention.o_proj = Summed(  # type: ignore[assignment]
        kept_columns(attention.o_proj, columns[kept.flatten()].flatten()), share.count
    )
    attention.kv_heads, attention.group, attention.heads = kv_heads, group, kv_heads * group


def _heads(attention: Attention, share: Share) -> tuple[slice, slice]:
    """This rank's kv heads, and which query heads of each."""
    if attention.kv_heads % share.count == 0:
        return share.of_length(attention.kv_heads), slice(0, attention.group)
    sharers = share.count // attention.kv_heads
    kv_head, place = divmod(share.number, sharers)
    return slice(kv_head, kv_head + 1), Share(place, sharers).of_length(attention.group)


def _shard_experts(moe: Moe, share: Share) -> None:
    mlps: list[nn.Module] = [*moe.experts]
    if moe.shared_mlp is not None:
        mlps.append(moe.shared_mlp)
    for mlp in mlps:
        assert isinstance(mlp, Mlp), "experts are small MLPs"
        inner = mlp.down_proj.in_features
        kept = torch.arange(inner)[share.of_length(inner)]
        mlp.gate_and_up_proj = kept_rows(mlp.gate_and_up_proj, _both_halves(kept, inner))
        mlp.down_proj = kept_columns(mlp.down_proj, kept)
    if moe.is_stacked:
        moe.stack()


def _both_halves(kept: Tensor, inner: int) -> Tensor:
    """Rows of `up`, then the same of the gate, `inner` further on."""
    return torch.cat([kept, kept + inner])
