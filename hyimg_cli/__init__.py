"""Batch image editing and generation with models that write a text before they draw.

The Python API of the `hyimg` command: `run_manifest` and its arguments. Names are imported on first
use, so importing the package never imports torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyimg_cli.engine.in_memory import draw as draw
    from hyimg_cli.engine.run import RunEnded as RunEnded
    from hyimg_cli.engine.run import RunPlanned as RunPlanned
    from hyimg_cli.engine.run import run_manifest as run_manifest
    from hyimg_cli.engine.runner import make_plan as make_plan
    from hyimg_cli.engine.session import Session as Session
    from hyimg_cli.journal.journal import RunFolder as RunFolder
    from hyimg_cli.journal.past_run import PastJob as PastJob
    from hyimg_cli.journal.past_run import past_jobs as past_jobs
    from hyimg_cli.manifest.manifest import read_manifest as read_manifest
    from hyimg_cli.scoring.best_of import draw_best as draw_best
    from hyimg_cli.settings.run import CacheConfig as CacheConfig
    from hyimg_cli.settings.run import CandidatesConfig as CandidatesConfig
    from hyimg_cli.settings.run import FailurePolicy as FailurePolicy
    from hyimg_cli.settings.run import ModelChoice as ModelChoice
    from hyimg_cli.settings.run import OutputConfig as OutputConfig
    from hyimg_cli.settings.run import RunConfig as RunConfig
    from hyimg_cli.settings.run import Sampling as Sampling

# Before numpy is imported: the threads of its products wait at full speed for the next one, on
# cores that torch has threads of its own for.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Before diffusers is imported: with it, the library fetches a kernel for GGUF and runs its code.
os.environ.pop("DIFFUSERS_GGUF_CUDA_KERNELS", None)

__version__ = "0.1.0"
_HOME = {
    "hyimg_cli.engine.in_memory": ("draw",),
    "hyimg_cli.engine.run": ("RunEnded", "RunPlanned", "run_manifest"),
    "hyimg_cli.engine.runner": ("make_plan",),
    "hyimg_cli.engine.session": ("Session",),
    "hyimg_cli.journal.journal": ("RunFolder",),
    "hyimg_cli.journal.past_run": ("PastJob", "past_jobs"),
    "hyimg_cli.manifest.manifest": ("read_manifest",),
    "hyimg_cli.scoring.best_of": ("draw_best",),
    "hyimg_cli.settings.run": (
        *(
            "CacheConfig",
            "CandidatesConfig",
            "FailurePolicy",
            "ModelChoice",
            "OutputConfig",
            "RunConfig",
            "Sampling",
        ),
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
