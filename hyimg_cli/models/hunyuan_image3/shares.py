"""Loading one rank's share of a checkpoint: what it does not keep, it never holds.

rank 0   its share of the layers, and all else: embeddings, heads, ViT, VAE
rank r   its share of the layers
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from hyimg_cli.kernels.choice import require_bitsandbytes
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.sharded import Cuts, shard, sum_over
from hyimg_cli.models.hunyuan_image3.split import refuse_uneven
from hyimg_cli.models.hunyuan_image3.weight_loading import fill, hold, without_weights
from hyimg_cli.models.hunyuan_image3.weights import checked, made_ready
from hyimg_cli.parallel.tensor import Share
from hyimg_cli.spec.run import Quantization

_LAYERS = "model.layers."


@dataclass(frozen=True)
class Weights:
    """Which weights, and how they are held; the same on every rank, and picklable."""

    folder: Path
    dtype: torch.dtype
    quantization: Quantization = "none"


def load_share(weights: Weights, share: Share, device: torch.device) -> HunyuanImage3ForCausalMM:
    """The network with this share of its layers on `device`; of ranks above 0 nothing else.

    Names, shapes and dtypes of the whole checkpoint are checked as for one process. Raises
    CheckpointError, UsageError where layers cannot be split so.
    """
    arch = checked(weights.folder)
    if weights.quantization == "nf4" and device.type == "cuda":
        require_bitsandbytes()
    refuse_uneven(arch, share.count, weights.quantization)
    cuts = Cuts(arch, share)
    network = without_weights(arch)
    shard(network, cuts)
    if weights.quantization != "none":
        hold(network, weights.quantization)
    fill(
        network,
        weights.folder,
        dtype=weights.dtype,
        place_of=lambda name: device,
        cut_of=cuts.of,
        is_wanted=lambda name: share.number == 0 or name.startswith(_LAYERS),
    )
    made_ready(network, weights.quantization)
    sum_over(network, share.count)
    return network
