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
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from hyimg_cli.kernels import formats
from hyimg_cli.spec import compilers
from hyimg_cli.tiling import blend

_OPS = torch.ops.aten
_KEPT = (
    blend._weights.cache_clear,
    formats.levels_on.cache_clear,
    compilers.triton_lacks.cache_clear,
)
_HOPPER = (9, 0)
# Operations that make tensors of integers, and the largest whose numbers are followed.
_MADE = {_OPS.arange, _OPS.zeros, _OPS.ones, _OPS.full, _OPS.scalar_tensor}
_MOST_KNOWN = 1 << 16
# Operations that start no kernel: views, and memory without contents.
_STARTS_NONE = {
    *("view", "reshape", "expand", "transpose", "permute", "detach", "alias", "slice", "select"),
    *("unsqueeze", "squeeze", "t", "split", "split_with_sizes", "chunk", "unbind", "as_strided"),
    *("_unsafe_view", "unflatten", "empty", "empty_like", "new_empty", "lift_fresh"),
    *("empty_strided", "is_pinned", "_pin_memory"),
}
_DATA: Any = torch.Tensor.data
_NUMPY: Any = torch.Tensor.numpy


class FakeGpu(TorchDispatchMode):
    """Counts bytes on the device, and notes where the host reads from it or waits for it.

    `reads`: values that the host asked for, by the line of ours that did. `waits`: copies to the
    device from memory that is not pinned. `sent`, `fetched`: bytes that came to the device and
    went back. `strays`: uses of what another stream allocated and may free at any time. `launches`:
    operations that start a kernel, Triton's too. `attention`: those of attention, by name; `masks`:
    how many of them read a mask. `token`: the id that a read of integers is told.
    """

    def __init__(self, token: int = 1) -> None:
        super().__init__()
        self.token = token
        self.live = self.peak = self.sent = self.fetched = 0
        self.reads: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.strays: Counter[str] = Counter()
        self.attention: Counter[str] = Counter()
        self.launches = self.masks = 0
        self._is_beside = False
        self._of_others: set[int] = set()
        self._known: dict[int, ref[Any]] = {}
        self._values = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # What a tensor says of itself (prim) touches no memory.
        if op.namespace in ("aten", "torch_attn"):
            self._note_strays(args, kwargs)
            self._note_launch(op, args, kwargs)
        if op is _OPS._local_scalar_dense.default:
            return self._told(args[0])
        if op is _OPS.is_pinned.default:
            return False
        if op is _OPS._pin_memory.default:
            out = args[0].clone()
            self._learn(out, self.value(args[0]))
            return out
        real = self._computed(op, args, kwargs)
        if op is _OPS._scaled_grouped_mm_v2.default:
            out = _product(*args[:2])
        else:
            self._note_wait(op, args, kwargs)
            try:
                out = op(*args, **kwargs)
            except DynamicOutputShapeException:
                out = self._of_known_shape(op, args, kwargs, real)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        for fake, one in zip(tree_iter(out), tree_iter(real), strict=False):
            self._learn(fake, one)
        return out

    def _of_known_shape(self, op: Any, args: Sequence[Any], kwargs: Any, real: Any) -> Any:
        """What an operation gives whose shape depends on numbers. A GPU's are read for that."""
        device = next(one.device for one in tree_iter((args, kwargs)) if _is_tensor(one))
        if device.type == "cuda":
            self.reads[_where()] += 1
        if op is _OPS.index.Tensor:  # a mask of known rows
            masks = [one if one is None else self.value(one) for one in args[1]]
            with no_dispatch():
                rows = [one if one is None else one.nonzero(as_tuple=True) for one in masks]
            places = [
                torch.empty(one.shape, dtype=one.dtype, device=device)
                for row in rows
                for one in row or ()
            ]
            return op(args[0], places)
        assert real is not None, f"{op} of numbers that nobody knows"
        return tree_map(lambda one: torch.empty(one.shape, dtype=one.dtype, device=device), real)

    def array(self, tensor: Tensor, *, force: bool = False) -> Any:
        """Stands in for `Tensor.numpy`: numbers from 0 to 1, where none are known."""
        assert force or tensor.device.type == "cpu", "a GPU's memory is not the host's"
        if not isinstance(tensor, FakeTensor):
            return _NUMPY(tensor, force=force)
        with no_dispatch():
            value = self.value(tensor)
            if value is None:
                value = torch.arange(tensor.numel()).remainder(5).div(4).to(tensor.dtype)
            return _NUMPY(value.view(tensor.shape))

    def value(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a small tensor of integers, if they followed from known ones."""
        if not isinstance(tensor, FakeTensor):  # made of a list or an array
            return None if tensor.is_floating_point() or tensor.is_meta else tensor
        if (constant := getattr(tensor, "constant", None)) is not None:
            # torch follows those on a CPU by itself, and would move them to a GPU.
            self._values[tensor], tensor.constant = constant, None  # type: ignore[attr-defined]
        return self._values.get(tensor)

    def _learn(self, fake: Any, real: Any) -> None:
        if _is_tensor(fake) and _is_tensor(real) and fake.shape == real.shape:
            self._values[fake] = real

    def _computed(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an operation on known integers gives; lengths and positions are such ones."""
        given = [one for one in tree_iter((args, kwargs)) if _is_tensor(one)]
        values = {id(one): self.value(one) for one in given}
        if op.namespace != "aten" or any(value is None for value in values.values()):
            # Written with what is not known, it is not known either.
            for one in given[:1] if op._schema.is_mutable else ():
                self._values.pop(one, None)
            return None
        if not given and op.overloadpacket not in _MADE:
            return None
        real = tree_map(lambda one: values.get(id(one), one) if _is_tensor(one) else one, args)
        named = tree_map(lambda one: values.get(id(one), one) if _is_tensor(one) else one, kwargs)
        if named.get("device") is not None:
            named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
        with no_dispatch():
            out = op(*real, **named)
        small = all(
            not one.is_floating_point() and one.numel() <= _MOST_KNOWN
            for one in tree_iter(out)
            if _is_tensor(one)
        )
        return out if small else None

    def forget(self) -> None:
        """Start all counts anew, from what is held now."""
        for found in (self.reads, self.waits, self.strays, self.attention):
            found.clear()
        self.sent = self.fetched = self.launches = self.masks = 0
        self.rebase()

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

    def _note_launch(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        name = op._schema.name.removeprefix("aten::")
        given = [one for one in tree_iter((args, kwargs)) if _is_tensor(one)]
        if name in _STARTS_NONE or not any(one.device.type == "cuda" for one in given):
            return
        self.launches += 1
        if op.namespace == "torch_attn":  # of many spans: never with a mask
            self.attention[name] += 1
        if name.startswith("_scaled_dot_product"):
            self.attention[name] += 1
            has_mask = len(args) > 3 and _is_tensor(args[3])
            self.masks += has_mask

    def _note_kernel(self, _name: str, _given: dict[str, Any]) -> None:
        self.launches += 1

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
        if (value := self.value(tensor)) is not None:
            with no_dispatch():
                found: int | float | bool = value.item()
            return found
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
            (torch.nn.Module, "_apply", _apply),
            (torch.Tensor, "data", property(_DATA.__get__, _put_data)),
        ):
            stack.enter_context(patch.object(target, name, stand_in))
        stack.enter_context(stand_ins(gpu._note_kernel))
        # Nothing is built either, so that no compiler is needed.
        stack.enter_context(patch.object(compilers, "compiler_lacks", lambda **_: ""))
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


def _is_tensor(one: Any) -> bool:
    return isinstance(one, Tensor)


def _put_data(tensor: Tensor, value: Tensor) -> None:
    """A fake tensor would keep its device."""
    _DATA.__set__(tensor, value)
    if isinstance(tensor, FakeTensor):
        tensor.fake_device = value.device


def _apply(module: torch.nn.Module, change: Any, recurse: bool = True) -> torch.nn.Module:
    """As torch does for real tensors: a module's parameters stay the same objects."""
    for part in module.modules() if recurse else [module]:
        for parameter in part.parameters(recurse=False):
            parameter.data = change(parameter.data)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = change(buffer)
    return module


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
