"""Count a rank's share of the decoder layers; no torch.

attention   a rank has some kv heads with their query heads; with more ranks than kv heads it
            has one kv head, which others have too, and some of that head's query heads
experts     a rank has its share of the inner width of all experts, the shared one too: the
            same work on every rank, whichever experts a row chooses
"""

from dataclasses import replace

from hyimg_cli.errors import UsageError
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.spec.card import RankBytes, WeightCounts

FLAG = "--tensor-parallel-size"
# NF4 has one scale for this many consecutive weights: see `kernels.formats`.
_NF4_BLOCK = 64


def heads_of_rank(arch: Architecture, ranks: int) -> tuple[int, int]:
    """Return the KV heads and query heads of the rank with the most, of this many ranks."""
    kv_heads, group = arch.num_key_value_heads, arch.heads_per_kv_head
    if kv_heads % ranks == 0:
        return kv_heads // ranks, kv_heads // ranks * group
    return 1, -(-group // (ranks // kv_heads))


def expert_counts(arch: Architecture, ranks: int = 1) -> WeightCounts:
    """Return the weights of a rank's experts, and of the routers, which every rank has whole."""
    layers, hidden = arch.num_hidden_layers, arch.hidden_size
    inner = arch.num_experts * arch.moe_intermediate_size // ranks
    router = arch.num_experts * hidden
    return WeightCounts(layers * 3 * inner * hidden, layers * (2 * inner + router), layers * router)


def rank_bytes(
    counts: WeightCounts, arch: Architecture, ranks: int, *, dtype: str, quantization: str
) -> RankBytes:
    """Return the bytes of weights and K/V on each rank, once loaded; see `WeightCounts.nbytes`."""
    # Every rank has the layers' norms whole.
    norms = arch.num_hidden_layers * 2 * (arch.hidden_size + arch.head_dim)
    experts = replace(expert_counts(arch, ranks), rest=split_weights(arch, ranks) + norms)
    saved = split_weights(arch, 1) - split_weights(arch, ranks)
    first = replace(experts, wide=counts.wide, rest=counts.rest - saved)
    return RankBytes(
        first=first.nbytes(dtype, quantization),
        other=experts.nbytes(dtype, quantization),
        kv_share=heads_of_rank(arch, ranks)[0] / arch.num_key_value_heads,
    )


def split_weights(arch: Architecture, ranks: int) -> int:
    """Return a rank's number of split weights: attention and shared experts."""
    kv_heads, query_heads = heads_of_rank(arch, ranks)
    attention = 2 * (query_heads + kv_heads) * arch.head_dim * arch.hidden_size
    shared = 3 * arch.moe_intermediate_size * arch.hidden_size // ranks
    return arch.num_hidden_layers * (attention + shared)


def refuse_uneven(arch: Architecture, ranks: int, quantization: str = "none") -> None:
    """Raise UsageError if heads and experts cannot be split over this many ranks."""
    if what := _uneven(arch, ranks):
        most = arch.num_key_value_heads * arch.heads_per_kv_head
        possible = [str(count) for count in range(2, most + 1) if not _uneven(arch, count)]
        raise UsageError(
            f"{what} cannot be split over {ranks} ranks",
            where=FLAG,
            hint=f"use {', '.join(possible)}" if possible else f"remove {FLAG}",
            code="usage.tensor-parallel",
        )
    width = arch.moe_intermediate_size // ranks
    if ranks > 1 and quantization == "nf4" and width % _NF4_BLOCK:
        raise UsageError(
            f"nf4 needs rows that are multiples of {_NF4_BLOCK} weights; each of {ranks} ranks "
            f"would have {width}",
            where=FLAG,
            hint="use fewer ranks, or --quantization fp8",
            code="usage.tensor-parallel",
        )


def _uneven(arch: Architecture, ranks: int) -> str:
    """Return what of a layer cannot be split over this many ranks; empty if all can.

    A rank has whole kv heads, or at least one query head of a kv head that others share.
    """
    kv_heads, group = arch.num_key_value_heads, arch.heads_per_kv_head
    is_shared = ranks % kv_heads == 0 and ranks // kv_heads <= group
    if kv_heads % ranks and not is_shared:
        return f"{kv_heads} kv heads with {group} query heads each"
    width = arch.moe_intermediate_size
    return f"experts of width {width}" if width % ranks else ""
