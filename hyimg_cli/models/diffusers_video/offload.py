"""Keep the networks of a checkpoint in main memory, and bring those that work to the device."""

import weakref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hyimg_cli.kernels.streamed_blocks import StreamedBlocks, tensors_of


class Offload:
    """CPU offload: one network at a time on the device, changed between stages.

        main memory   text encoders, transformers, VAE: all weights, while they are loaded
        device        a copy of the weights of one network, or of those that work together

    In groups, blocks of transformers and text encoders come one at a time, each while the one
    before it works; the rest of each network comes as a whole. Weights are only read, so pixels are
    the same, and nothing goes back to main memory.
    """

    def __init__(self, device: torch.device, *, in_groups: bool = False) -> None:
        self._device, self._in_groups = device, in_groups
        self._networks: tuple[nn.Module, ...] = ()
        # A network's tensors, and their data in main memory.
        self._at_home: list[tuple[Tensor, Tensor]] = []
        self._streamed: weakref.WeakKeyDictionary[nn.Module, StreamedBlocks] = (
            weakref.WeakKeyDictionary()
        )

    def keep(self, network: nn.Module) -> None:
        """Keep a network in main memory, and bring its blocks one at a time if requested."""
        for tensor in tensors_of(network):  # bitsandbytes packs weights on the GPU
            tensor.data = tensor.data.cpu()
        if self._in_groups and (blocks := _blocks(network)):
            self._streamed[network] = StreamedBlocks(blocks, self._device)

    def bring(self, *networks: nn.Module) -> None:
        """Bring networks to the device before a forward.

        Raises torch.OutOfMemoryError if they do not fit; they then stay in main memory.
        """
        if networks == self._networks:
            return
        self.release()
        self._networks = networks
        try:
            for network in networks:
                # All of them except blocks that are brought one at a time.
                blocks = _blocks(network) if network in self._streamed else []
                alone = {id(tensor) for block in blocks for tensor in tensors_of(block)}
                for tensor in (one for one in tensors_of(network) if id(one) not in alone):
                    away = tensor.data.to(self._device, copy=True)
                    self._at_home.append((tensor, tensor.data))
                    tensor.data = away
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Free what is on the device; it can be brought again."""
        for tensor, at_home in self._at_home:
            tensor.data = at_home
        self._at_home.clear()
        self._networks = ()
        for streamed in self._streamed.values():
            streamed.release()


def _blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformer or text encoder; empty for other networks.

    Of blocks inside a block only the outer one.
    """
    of_texts = "_no_split_modules" if isinstance(network, PreTrainedModel) else ""
    kinds = getattr(network, of_texts or "_repeated_blocks", None) or ()
    lists = (one for one in network.modules() if isinstance(one, nn.ModuleList))
    found = [block for one in lists for block in one if type(block).__name__ in kinds]
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]
