"""Facts needed before measuring the network: how many layers fit, and which experts tokens
choose.
"""

from collections.abc import Callable

from random_network import quantization_of
from torch import Tensor
from workload import Workload

from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM


def layers_that_fit(load: Workload, form: str, free_bytes: float) -> int:
    """Return how many of the workload's layers fit on a GPU with all that is run on them.

    At least one. Each has its weights and its K/V of all requests. Also counted are the parts
    around the layers, and three times the planned memory of a picture in the VAE: itself, another
    copy of its weights, and the libraries' workspaces.
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
    """Return a call's mean number of experts read per layer, and the busiest quarter's share.

    The share is of the choices; both are means over the layers.
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
