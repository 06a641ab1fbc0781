"""Provenance of a file, for its metadata: what a replay sets again, and what it cannot."""

import torch

from hyimg_cli import __version__
from hyimg_cli.journal.keys import mask_print, model_print, pixel_settings, precision
from hyimg_cli.journal.provenance import versions
from hyimg_cli.media.metadata import Provenance
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import Job


def file_provenance(job: Job, config: RunConfig) -> Provenance:
    """Everything known in this process that decides the bits of the job's file."""
    kind = precision(config.model)[0]
    settings = pixel_settings(job, config) | mask_print(job) | {"device": kind}
    return Provenance(
        version=__version__,
        model_fingerprint=model_print(job, config),
        settings=settings | _processor(kind),
        packages={name: found for name, found in versions().items() if name != "hyimg"},
    )


def _processor(kind: str) -> dict[str, str]:
    """Facts of a device that change how sums are rounded: no names of the machine."""
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return {"capability": f"{major}.{minor}"}
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }
