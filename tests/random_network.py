"""HunyuanImage-3's network with random weights, each drawn on the device that holds it.

Nothing is in host memory first. Experts in FP8 are quantised one at a time, as a checkpoint's are.
"""

import torch
from torch import Tensor, nn

from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.weights import stays_wide, without_weights
from hyimg_cli.settings.run import Quantization

FORMS = ("fp8", "dense")


def quantization_of(form: str) -> Quantization:
    """What the command calls a format."""
    return "fp8" if form == "fp8" else "none"


def build(
    arch: Architecture, form: str, device: torch.device, dtype: torch.dtype
) -> HunyuanImage3ForCausalMM:
    """A network ready for inference; sums stay near one, as in a trained one."""
    network = without_weights(arch, quantization_of(form))
    with torch.no_grad():
        for layer in network.model.layers:
            layer.mlp.make_room(dtype, device)
            if form == "fp8":
                _fill_stacks(layer.mlp, arch, device)
            else:
                for stack_EOI in layer.mlp.stacks:
                    stack_EOI.normal_(std=stack_EOI.shape[2] ** -0.5)
            _fill(layer, network, device, dtype)
        _fill(network, network, device, dtype)
        network.model.choose_kernels()
    left = [n for n, t in (*network.named_parameters(), *network.named_buffers()) if t.is_meta]
    assert not left, f"without weights: {left[:5]}"
    network.requires_grad_(False)
    network.eval()
    return network


def _fill_stacks(moe: nn.Module, arch: Architecture, device: torch.device) -> None:
    width, inner = arch.hidden_size, arch.moe_intermediate_size
    for expert in range(arch.num_experts):
        for matrix, shape in (
            ("gate_and_up_proj", (2 * inner, width)),
            ("down_proj", (width, inner)),
        ):
            moe.quantised(matrix).put(expert, torch.randn(shape, device=device) * shape[1] ** -0.5)


def _fill(
    part: nn.Module, network: HunyuanImage3ForCausalMM, device: torch.device, dtype: torch.dtype
) -> None:
    """Give every parameter that has no memory yet its own, and numbers."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for module in part.modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            wide = stays_wide(names[id(parameter)])
            made = torch.empty(
                parameter.shape, device=device, dtype=torch.float32 if wide else dtype
            )
            setattr(module, own, nn.Parameter(_drawn(made, module, own), requires_grad=False))


def _drawn(tensor: Tensor, module: nn.Module, own: str) -> Tensor:
    if isinstance(module, nn.Embedding):
        return tensor.normal_()
    if tensor.dim() == 1:
        return tensor.fill_(0.0 if own.endswith("bias") else 1.0)
    return tensor.normal_(std=(tensor.numel() // tensor.shape[0]) ** -0.5)
