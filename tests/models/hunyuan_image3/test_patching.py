"""Where the layers around the transformer round, in 16 bits: as under upstream's autocast."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM, ResBlock


def _norm(block: ResBlock, number: int, x: Tensor) -> Tensor:
    """Float32 in, float32 out: autocast runs group norms so, whatever they are given."""
    norm = (block.in_layers[0], block.out_layers[0])[number]
    return F.group_norm(x.float(), 32, norm.weight.float(), norm.bias.float(), 1e-5)


def test_a_block_in_bfloat16_rounds_before_its_convolutions_alone() -> None:
    torch.manual_seed(0)
    block = ResBlock(64, 128, 32).bfloat16()
    for norm in (block.in_layers[0], block.out_layers[0]):
        torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    x = torch.randn(2, 64, 6, 8).bfloat16()
    embedding = torch.randn(2, 32).bfloat16()
    with torch.no_grad():
        found = block(x, embedding)
        hidden = block.in_layers[2](F.silu(_norm(block, 0, x)).bfloat16())
        scale, shift = block.emb_layers(embedding)[..., None, None].chunk(2, dim=1)
        wide = _norm(block, 1, hidden) * (1 + scale) + shift
        expected = block.skip_connection(x) + block.out_layers[3](F.silu(wide).bfloat16())
    assert wide.dtype == torch.float32
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_a_velocity_in_bfloat16_comes_in_bfloat16(small_network: HunyuanImage3ForCausalMM) -> None:
    """In float32 nothing is cast: the same bits as plain layers give."""
    final = small_network.final_layer
    tokens, embedding = torch.randn(1, 12, 64), torch.randn(1, 64)
    with torch.no_grad():
        wide = final(tokens, embedding, 3)
        head = final.model[1]
        hidden = final.model[0](tokens.transpose(1, 2).unflatten(2, (3, -1)), embedding)
        plain = F.group_norm(hidden, 32, head[0].weight, head[0].bias, 1e-5)
        assert torch.equal(wide, head[2](F.silu(plain)))
    assert wide.dtype == torch.float32
