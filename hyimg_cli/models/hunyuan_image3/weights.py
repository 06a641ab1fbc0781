"""Load a checkpoint in the official layout: every key and no other, safetensors only.

Names and shapes are checked from the files' headers before a byte of weight is read. Then each
tensor is copied into a network without weights, which has room only for what it keeps: an expert's
matrix in fewer bits, or a rank's share of a layer. Nothing is held twice. Code that a checkpoint
names (`auto_map`) is never executed: the class is ours.

    one process   the whole network, on the CPU, a GPU, or spread over all of them
    rank 0        its share of the layers, and all else: embeddings, heads, ViT, VAE
    rank r        its share of the layers
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hyimg_cli.errors import MachineError
from hyimg_cli.kernels.choice import require_bitsandbytes
from hyimg_cli.kernels.formats import Fp8Rows, Nf4Blocks
from hyimg_cli.kernels.offloaded_experts import OffloadedExperts
from hyimg_cli.loading.checkpoint import check_tensors, weight_files
from hyimg_cli.loading.kept import KeptWeights
from hyimg_cli.loading.packed import stored_index
from hyimg_cli.loading.readers import StoredTensor, read_all
from hyimg_cli.loading.unfilled import refuse_unfilled
from hyimg_cli.models.common.weights import owner_of, refuse_missing, set_weight, tensor_shapes
from hyimg_cli.models.hunyuan_image3.card import read_architecture
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.sharded import Cuts, Share, WeightCut, shard, sum_over
from hyimg_cli.models.hunyuan_image3.split import refuse_uneven
from hyimg_cli.settings.run import CacheConfig, Quantization
from hyimg_cli.spec import digest

_EXPERT = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<expert>\d+)"
    r"\.(?P<matrix>gate_and_up_proj|down_proj)\.weight"
)
_LAYERS = "model.layers."
_WHOLE_LAYERS = Share(0, 1)
# Modules that are on one device as a whole.
_NOT_SPLIT = ["DecoderLayer", "ResBlock", "VisionTower", "Vae"]
# The router computes in float32 in any case; the VAE loses detail in narrower dtypes.
_WIDE = {"wg", "vae"}
Places = Mapping[str, int | str | torch.device]


def load(
    folder: Path,
    *,
    dtype: torch.dtype,
    device_map: str | None = None,
    quantization: Quantization = "none",
    cache: CacheConfig | None = None,
    offloads_experts: bool = False,
    share: Share = _WHOLE_LAYERS,
    first: int = 0,
) -> HunyuanImage3ForCausalMM:
    """Return the network of `folder` in `dtype`, ready for inference.

    The router and the VAE stay float32. `device_map`: None for the CPU, "cuda:0" for one GPU,
    "balanced" for all. `quantization` stores the routed experts, 93 % of the weights, in fewer
    bits, which a `cache` keeps. `offloads_experts`: experts (see `offload_experts`) and VAE are in
    main memory.

    `share`: this rank's share of the layers; ranks above 0 have nothing else. `first`: the rank
    with the first share, followed by the others. The whole checkpoint is always checked.

    Raises CheckpointError if files are missing, damaged, pickled, of another shape, or quantized;
    MachineError if they do not fit on the GPUs, or a package is missing; UsageError if layers
    cannot be split.
    """
    arch = checked(folder)
    if quantization == "nf4" and device_map not in (None, "cpu"):
        require_bitsandbytes()
    refuse_uneven(arch, share.count, quantization)
    cuts = Cuts(arch, share) if share.count > 1 else None
    network = without_weights(arch, quantization, cuts)
    moes = [layer.mlp for layer in network.model.layers]

    # The device of each module; experts are allocated at once.
    places: Places = {"": device_map or "cpu"}
    experts = [f"{_LAYERS}{number}.mlp.experts" for number in range(len(moes))]
    if device_map == "balanced":
        places = balanced(network, dtype)
    elif offloads_experts:
        places = {**places, **dict.fromkeys([*experts, "vae"], "cpu")}
    for moe, name in zip(moes, experts, strict=True):
        moe.make_room(dtype, place_of(name, places))

    # Every tensor goes to its place, cut to the rank's share; ranks after the first have only
    # layers. Quantized weights come from the cache on a hit, and go there on a miss.
    start = "" if first + share.number == 0 else _LAYERS
    missing = {name for name in network.state_dict() if name.startswith(start)}
    kept: KeptWeights | None = None
    if cache is not None and cache.folder is not None and quantization != "none":
        nbytes = sum(part.nbytes for moe in moes for part in moe.experts.buffers())
        kept = KeptWeights(cache, type(moes[0].quantised("down_proj")).__name__, nbytes)

    def put(stored: StoredTensor) -> None:
        expert = _EXPERT.fullmatch(stored.name)
        cut = None if cuts is None else cuts.of(stored.name)
        if expert and (moe := moes[int(expert["layer"])]).is_quantised:
            _quantise(moe.quantised(expert["matrix"]), int(expert["expert"]), stored, cut, kept)
            return
        module, own = owner_of(network, stored.name)
        room: Tensor = getattr(module, own)
        if room.is_meta:
            wanted = torch.float32 if stays_wide(stored.name) else dtype
            room = torch.empty(room.shape, dtype=wanted, device=place_of(stored.name, places))
            set_weight(module, own, room)
        if cut is None:
            stored.into(room)
        else:
            room.copy_(cut.of(stored.whole()))
        missing.discard(stored.name)

    stored = {name: info for name, info in stored_index(folder).items() if name.startswith(start)}
    read_all(weight_files(folder), stored, put)
    if kept is not None:
        kept.tell()
    refuse_missing(missing)

    # Ready for inference, on each layer's device.
    if device_map == "balanced" and len(set(places.values())) > 1:
        from accelerate import dispatch_model

        dispatch_model(network, dict(places))
    network.requires_grad_(False)
    network.model.choose_kernels()
    network.eval()
    sum_over(network, range(first, first + share.count))
    return network


def offload_experts(network: HunyuanImage3ForCausalMM, resident_bytes: int) -> OffloadedExperts:
    """Move the layers' experts to main memory, to be fetched from there.

    The device keeps two layers of them, and as many others as `resident_bytes` hold.
    """
    layers = network.model.layers
    stacks = [layer.mlp.stacks for layer in layers]
    offloaded = OffloadedExperts(stacks, network.layer_devices[0], resident_bytes)
    for number, layer in enumerate(layers):
        layer.mlp.compute = offloaded.of_layer(number)
    return offloaded


def checked(folder: Path) -> Architecture:
    """Return the architecture of `folder`, whose files must have exactly its tensors.

    Raises CheckpointError.
    """
    arch = read_architecture(folder)
    found = stored_index(folder)
    check_tensors(found, expected_shapes(arch), folder)
    refuse_unfilled(folder, found)
    return arch


@lru_cache(maxsize=2)  # The network must be built to know them.
def expected_shapes(arch: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Return every tensor of a checkpoint of this architecture, without allocating any."""
    return tensor_shapes(without_weights(arch))


def without_weights(
    arch: Architecture, quantization: Quantization = "none", cuts: Cuts | None = None
) -> HunyuanImage3ForCausalMM:
    """Return the network on the meta device, cut to a share, experts in their format."""
    with torch.device("meta"), _NoValues():
        network = HunyuanImage3ForCausalMM(arch)
    if cuts is not None:
        shard(network, cuts)
    if quantization != "none":
        for layer in network.model.layers:
            layer.mlp.hold(quantization)
    return network


class _NoValues(TorchFunctionMode):
    """Skips the initial values of new weights in its block.

    On the meta device, they would make torch import its compiler, which takes longer than loading a
    small model.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _quantise(
    stack: Fp8Rows | Nf4Blocks,
    expert: int,
    stored: StoredTensor,
    cut: WeightCut | None,
    kept: KeptWeights | None,
) -> None:
    def quantise() -> None:
        if cut is None:
            for first, rows in stored.rows(stack.device):
                stack.put(expert, rows, first=first)
        elif cut.dim == 1:
            stack.put(expert, stored.whole(), cut.index)
        else:
            stack.put(expert, cut.of(stored.whole()))

    if kept is None:
        quantise()
    else:
        share = "" if cut is None else f"{cut.dim} {digest.of_bytes(cut.index.numpy().tobytes())}"
        kept.fill([tensor[expert] for tensor in stack.tensors], stored, share, quantise)


def balanced(
    network: nn.Module, dtype: torch.dtype, shares: dict[int | str, int] | None = None
) -> Places:
    """Assign modules to GPUs in even parts of free memory, or by `shares` in bytes.

    Raises MachineError if a layer would be outside the GPUs, and fetched each time.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    wide = {name: torch.float32 for name in network.state_dict() if stays_wide(name)}
    known = {"no_split_module_classes": _NOT_SPLIT, "dtype": dtype, "special_dtypes": wide}
    shares = shares or get_balanced_memory(network, **known)
    # Nothing is offloaded in the end; this only avoids a warning.
    places: Places = infer_auto_device_map(
        network, max_memory=shares, offload_buffers=True, **known
    )
    outside = [name for name, place in places.items() if place in ("cpu", "disk")]
    if outside:
        raise MachineError(
            f"the weights do not fit on the GPUs ({len(outside)} modules left over)",
            hint="use --quantization fp8 (half the weights) or nf4 (a quarter), or more or larger "
            "GPUs; hyimg plan shows the size of the weights",
            code="machine.gpu-memory",
        )
    return places


def stays_wide(name: str) -> bool:
    """True if a tensor is float32 in any network."""
    return not _WIDE.isdisjoint(name.split("."))


def place_of(name: str, places: Places) -> torch.device:
    """Return a tensor's device: that of the longest module path in `places` above it."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    place = places[name]
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
