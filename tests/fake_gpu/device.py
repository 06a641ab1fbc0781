"""A GPU that is not there: everything is launched, nothing is computed, memory is counted.

torch's fake tensors have a device, a shape and a dtype, and no memory. The engine's own code runs
on them at any size. What is counted is what tensors take by their sizes: no allocator's gaps, no
workspaces, no context. Kernels are not run, so nothing is said about them, nor about numbers.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch
from fake_gpu.standins import stand_ins
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hyimg_cli.kernels import formats
from hyimg_cli.tiling import blend

_OPS = torch.ops.aten
_KEPT = (blend._weights.cache_clear, formats.levels_on.cache_clear)
_HOPPER = (9, 0)
_DATA: Any = torch.Tensor.data


class FakeGpu(TorchDispatchMode):
    """Counts bytes on the device, and notes where the host reads from it or waits for it.

    `reads`: values that the host asked for, by the line of ours that did. `waits`: copies to the
    device from memory that is not pinned. `sent`, `fetched`: bytes that came to the device and
    went back. `strays`: uses of what another stream allocated and may
    free at any time. `token`: the id that a read of integers is told.
    """

    def __init__(self, token: int = 1) -> None:
        super().__init__()
        self.token = token
        self.live = self.peak = self.sent = self.fetched = 0
        self.reads: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.strays: Counter[str] = Counter()
        self._is_beside = False
        self._of_others: set[int] = set()
        self._known: dict[int, ref[Any]] = {}
        self._pinned: set[int] = set()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # What a tensor says of itself (prim) touches no memory.
        if op.namespace == "aten":
            self._note_strays(args, kwargs)
        if op is _OPS._local_scalar_dense.default:
            return self._told(args[0])
        if op is _OPS.is_pinned.default:
            return False
        if op is _OPS._pin_memory.default:
            out = args[0].clone()
            self._pinned.add(id(out))
            return out
        if op is _OPS._scaled_grouped_mm_v2.default:
            out = _product(*args[:2])
        else:
            self._note_wait(op, args, kwargs)
            out = op(*args, **kwargs)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    def rebase(self) -> int:
        """What is held now; the peak starts from here."""
        self.peak = self.live
        return self.live

    @contextmanager
    def beside(self, _stream: Any) -> Iterator[None]:
        """Stands in for `torch.cuda.stream`: what is allocated inside is another stream's."""
        self._is_beside = True
        yield
        self._is_beside = False

    def record(self, tensor: Tensor, _stream: Any) -> None:
        """Stands in for `Tensor.record_stream`."""
        self._of_others.discard(id(tensor.untyped_storage()))

    def _note_strays(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self._is_beside or not self._of_others:
            return
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) in self._of_others:
                self.strays[_where()] += 1

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known and self._known[key]() is storage:
            return

        def gone(_: Any) -> None:
            self.live -= size
            self._known.pop(key, None)
            self._of_others.discard(key)

        if self._is_beside:
            self._of_others.add(key)
        self._known[key] = ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _told(self, tensor: Tensor) -> int | float | bool:
        if tensor.device.type == "cuda":
            self.reads[_where()] += 1
        if tensor.dtype == torch.bool:
            return True
        return 0.5 if tensor.is_floating_point() else self.token

    def _note_wait(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if op is _OPS._to_copy.default:
            source, target = args[0], kwargs.get("device") or args[0].device
            is_queued = kwargs.get("non_blocking", False)
        elif op is _OPS.copy_.default:
            target, source = args[0].device, args[1]
            is_queued = kwargs.get("non_blocking", len(args) > 2 and args[2])
        else:
            return
        if not isinstance(source, Tensor) or source.device.type == target.type:
            return
        if target.type == "cuda":
            self.sent += source.nbytes
        elif source.device.type == "cuda":
            self.fetched += source.nbytes
        if not is_queued and target.type != "meta":
            self.waits[_where()] += 1


@contextmanager
def fake_gpu(token: int = 1) -> Iterator[FakeGpu]:
    """Inside, `cuda:0` is a Hopper without memory or time; gradients are off."""
    gpu = FakeGpu(token)
    with ExitStack() as stack:
        for target, name, stand_in in (
            (torch.cuda, "get_device_capability", lambda _device=None: _HOPPER),
            (torch.cuda, "get_device_name", lambda _device=None: "a Hopper"),
            (torch.cuda, "Event", _Event),
            (torch.cuda, "Stream", _Stream),
            (torch.cuda, "stream", gpu.beside),
            (torch.cuda, "current_stream", _Stream),
            (torch.cuda, "cudart", _Runtime),
            (torch.Tensor, "record_stream", lambda tensor, stream: gpu.record(tensor, stream)),
            (torch.Tensor, "data_ptr", lambda tensor: id(tensor)),
            (torch.Tensor, "data", property(_DATA.__get__, _put_data)),
        ):
            stack.enter_context(patch.object(target, name, stand_in))
        stack.enter_context(stand_ins())
        # What the package keeps on a device from call to call is of one mode alone.
        for kept in _KEPT:
            stack.callback(kept)
            kept()
        stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.no_grad())
        yield stack.enter_context(gpu)


class _Event:
    def record(self, _stream: Any) -> None:
        """Nothing is queued."""

    def synchronize(self) -> None:
        """Nothing is waited for."""


class _Stream:
    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, _other: Any) -> None:
        """What is queued is done at once."""

    def wait_event(self, _event: Any) -> None:
        """What is queued is done at once."""

    def record_event(self) -> "_Event":
        return _Event()

    def synchronize(self) -> None:
        """What is queued is done at once."""


def _put_data(tensor: Tensor, value: Tensor) -> None:
    """A fake tensor would keep its device."""
    _DATA.__set__(tensor, value)
    if isinstance(tensor, FakeTensor):
        tensor.fake_device = value.device


class _Runtime:
    def cudaHostRegister(self, _pointer: int, _size: int, _flags: int) -> int:
        return 0

    def cudaHostUnregister(self, _pointer: int) -> int:
        return 0


def _product(rows: Tensor, weights: Tensor) -> Tensor:
    """An FP8 product's output; older versions of torch do not know its shape without a GPU."""
    assert rows.device == weights.device, "one device"
    return rows.new_empty(rows.shape[0], weights.shape[-1], dtype=torch.bfloat16)


def _where() -> str:
    """The innermost line of this package that is at work, by file and function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("hyimg_cli."):
            return f"{name.removeprefix('hyimg_cli.')}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
