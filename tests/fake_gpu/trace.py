"""Released models on the fake GPU, each in a process of its own, which its stand-ins end with.

    PYTHONPATH=tests:recipes/build-tiny-editors python -m fake_gpu.trace editors \
        black-forest-labs/FLUX.2-klein-4B --offload group

prints a trace as JSON. A family is a module of this folder with `trace(folder, name, offload,
card_gb)`, which writes the model's files, enters `fake_process` and ends its stages one by one.
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import torch
import transformers
from fake_gpu.device import FakeGpu, fake_gpu
from fake_gpu.table import H200_GB, arguments
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from transformers.initialization import no_init_weights

from hyimg_cli.loading import readers
from hyimg_cli.memory import available

TESTS = Path(__file__).parents[1]
_TENSOR: Any = torch.tensor
# Main memory beside it: weights wait there, which here are sizes without numbers.
_MAIN_BYTES = 512_000_000_000


@dataclass
class Stage:
    """What one stage of a job did. Bytes: at the peak, to the GPU and back.

    `reads`, `waits` and `strays`: by line of ours, see `FakeGpu`.
    """

    peak: int
    sent: int
    fetched: int
    launches: int
    masks: int
    reads: dict[str, int]
    waits: dict[str, int]
    strays: dict[str, int]
    attention: dict[str, int]


@dataclass
class Trace:
    """A model's stages in order; `planned`: the plan's bytes by moment, without its margin."""

    stages: dict[str, Stage] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    # Repeated blocks of the transformer, or layers, and their bytes.
    blocks: int = 0
    block_bytes: int = 0
    notes: list[str] = field(default_factory=list)


class Stages:
    """Collects a trace: everything since the last stage's end belongs to the one that ends."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.trace = gpu, Trace()

    def end(self, name: str) -> None:
        gpu = self.gpu
        found = (gpu.reads, gpu.waits, gpu.strays, gpu.attention)
        self.trace.stages[name] = Stage(
            gpu.peak, gpu.sent, gpu.fetched, gpu.launches, gpu.masks, *map(dict, found)
        )
        gpu.forget()


def traced(family: str, name: str, offload: str = "none", card_gb: int = H200_GB) -> Trace:
    """Trace on a card of this size in a new process. Raises CalledProcessError if that fails."""
    recipes = (TESTS.parent / "recipes").glob("build-tiny-*")
    paths = [str(TESTS), *map(str, recipes)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fake_gpu.trace", family, name, "--offload", offload]
    command += ["--card-gb", str(card_gb)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    found["stages"] = {one: Stage(**stage) for one, stage in found["stages"].items()}
    return Trace(**found)


@contextmanager
def fake_process(card_gb: int) -> Iterator[Stages]:
    """A fake GPU of this size with stand-ins that may outlive it: the process does nothing else.

    Libraries keep what they made here, such as buffers without numbers.
    """
    size = card_gb * 1_000_000_000
    with fake_gpu() as gpu:
        for target, name, stand_in in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "mem_get_info", lambda _device=None: (size - gpu.live, size)),
            (torch.cuda, "memory_allocated", lambda _device=None: gpu.live),
            (torch.cuda, "memory_reserved", lambda _device=None: gpu.live),
            (torch.cuda, "empty_cache", lambda: None),
            (available, "available_bytes", lambda: _MAIN_BYTES),
            (readers, "safe_open", lambda _path, **_: nullcontext()),
            (readers.StoredTensor, "_read", lambda _self, _memory, _start: None),
            (ThreadPoolExecutor, "submit", _submitted),
            (torch, "tensor", _tensor),
            (torch.Tensor, "numpy", lambda tensor, **how: gpu.array(tensor, **how)),
            (diffusers.ModelMixin, "from_pretrained", classmethod(_built)),
            (transformers.PreTrainedModel, "from_pretrained", classmethod(_built)),
        ):
            patch.object(target, name, stand_in).start()
        yield Stages(gpu)


def _tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """Numbers of the host, then on the device; torch would ask the driver."""
    numbers = tree_map(lambda one: one.item() if isinstance(one, FakeTensor) else one, data)
    made: Tensor = _TENSOR(numbers, device="cpu", **options)
    return made if device is None else made.to(device)


def _submitted(_pool: Any, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
    """Work at once: torch's modes belong to a thread."""
    future: Future[Any] = Future()
    try:
        future.set_result(call(*args, **named))
    except Exception as error:
        future.set_exception(error)
    return future


def _built(cls: Any, folder: Path, dtype: torch.dtype, **_: Any) -> tuple[Any, dict[str, Any]]:
    """A library's network from its configuration: its weights have no numbers to be read."""
    with no_init_weights():  # some draw until numbers are in a range
        if issubclass(cls, diffusers.ModelMixin):
            module = cls.from_config(cls.load_config(folder))
            wide = set(module._keep_in_fp32_modules or ())
        else:
            module = cls(cls.config_class.from_pretrained(folder))
            module.tie_weights()
            wide = set(module._get_dtype_plan(dtype))
    for name, parameter in module.named_parameters():
        is_wide = not wide.isdisjoint(name.split("."))
        parameter.data = parameter.data.to(torch.float32 if is_wide else dtype)
    return module, {}


def main() -> None:
    given = arguments(__doc__)
    warnings.simplefilter("error")
    # The library looks at the range of pixels, and these have no numbers.
    warnings.filterwarnings("ignore", "Passing `image` as torch tensor", FutureWarning)
    family: Any = import_module(f"fake_gpu.{given.family}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HYIMG_CACHE_DIR"] = str(Path(folder) / "cache")
        found = family.trace(Path(folder), given.name, given.offload, given.card_gb)
    print(json.dumps(asdict(found)), flush=True)  # noqa: T201
    os._exit(0)  # nothing is taken down


if __name__ == "__main__":
    main()
