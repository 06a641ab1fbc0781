"""Settings of torch and of the C library for the whole process while a model works."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch.backends import cuda, cudnn

from hyimg_cli.parallel.devices import restored_environment, set_determinism
from hyimg_cli.settings.run import ModelChoice

# Parameters of glibc's mallopt: blocks of at least this size are mapped one by one (the maximum),
# and this many free bytes stay in the process.
_MAPPED, _KEPT = (-3, 32 << 20), (-1, 64 << 20)


@contextmanager
def torch_settings(choice: ModelChoice, *, draws: bool) -> Iterator[None]:
    """Apply the settings of `choice` to torch inside the context, and restore them afterwards.

    `draws`: True for a model of pictures. On a GPU its VAE convolves in TF32, torch's own default,
    unless `choice` asks for full float32. Matrix products, including a router's, always use full
    float32.
    """
    _keep_freed_memory()
    with ExitStack() as stack:
        stack.enter_context(restored_environment("CUBLAS_WORKSPACE_CONFIG"))
        _restore_flag(stack, cudnn, "benchmark")
        _restore_flag(stack, torch.utils.deterministic, "fill_uninitialized_memory")
        stack.callback(set_determinism, torch.are_deterministic_algorithms_enabled())
        set_determinism(choice.deterministic)
        if draws and choice.kind(has_gpu=torch.cuda.is_available()) == "cuda":
            _restore_flag(stack, cudnn, "allow_tf32")
            _restore_flag(stack, cuda.matmul, "allow_tf32")
            cudnn.allow_tf32 = choice.vae_dtype != "float32"
            cuda.matmul.allow_tf32 = False
        yield


def _restore_flag(stack: ExitStack, owner: object, name: str) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))


@cache
def _keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next denoise step.

    glibc raises both thresholds to these values itself once a block of 32 MB was freed. A small
    model frees none that large, so every step would return its memory to the system and fault it in
    again.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for parameter, value in (_MAPPED, _KEPT):
            mallopt(parameter, value)
