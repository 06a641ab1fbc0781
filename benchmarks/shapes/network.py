"""Facts needed before measuring the network: how many layers fit, and which experts tokens
choose.
"""

from collections.abc import Callable

from random_network import quantization_of
from torch import Tensor
from workload import Workload

from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM


def layers_that_fit(load: Workload, form: str, free_bytes: float) -> int:
    """How many of the workload's layers a GPU takes with all that is run on them; one at least.

    Each has its weights and its K/V of all requests together. Beside them are what stands around
    the layers, and three times what the plan says of a picture in the VAE: that, another copy of
    its weights, and the libraries' workspaces.
    """
    card, arch, scale = load.prompter.card, load.arch, load.scale
    dtype, quantization = "bfloat16", quantization_of(form)
    layer = load.layer.nbytes(dtype, quantization)
    around = card.loaded_bytes(dtype, quantization) - arch.num_hidden_layers * layer
    kv = scale.together * load.layout.live_stop * card.kv_bytes_per_token
    pixels = scale.size.height * scale.size.width
    room = free_bytes - around - 3 * card.vae_bytes(pixels, "cuda")
    fits = int(room // (layer + kv / arch.num_hidden_layers))
    return max(1, min(arch.num_hidden_layers, fits))


def routing(network: HunyuanImage3ForCausalMM, call: Callable[[], object]) -> tuple[float, float]:
    """Of one call: how many experts a layer reads, and what share of the choices the busiest
    quarter of them gets; means over the layers.
    """
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
        for layer in network.model.layers
    ]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    experts = network.arch.num_experts
    counts = [index.flatten().bincount(minlength=experts).float() for index in chosen]
    read = [float((count > 0).sum()) for count in counts]
    busiest = [float(c.sort(descending=True)[0][: experts // 4].sum() / c.sum()) for c in counts]
    return sum(read) / len(read), sum(busiest) / len(busiest)
