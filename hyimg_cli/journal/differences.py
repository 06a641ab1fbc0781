"""In what a job differs from the one that a folder holds a result of, by what the folder says.

The result's key tells that it does; `manifest.resolved.jsonl` and `run.json` tell in what, as far
as they are of that result's run.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hyimg_cli.journal.journal import NOT_FOUND, shaping_fields
from hyimg_cli.journal.keys import UNREADABLE, source_digest
from hyimg_cli.journal.past_run import read_run_info, readable_jobs
from hyimg_cli.journal.provenance import portable
from hyimg_cli.manifest.resolved import job_to_json
from hyimg_cli.models import registry
from hyimg_cli.settings.config import in_config
from hyimg_cli.settings.run import InKey, RunConfig
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.job import Job

UNKNOWN = "what this folder does not say"


def differing(folder: Path, config: RunConfig) -> Callable[[Job], list[str]]:
    """Names the differences of a job and the recorded one of its id: fields, `model`, settings,
    `source image`, or that one is not found; of jobs for which nothing is recorded, `UNKNOWN`.
    """
    lines, run_info = cache(lambda: readable_jobs(folder)), cache(lambda: read_run_info(folder))
    fingerprint = cache(lambda model: registry.fingerprint(model, config.model.revision))

    def of(job: Job) -> list[str]:
        lost = [path for path in job.images if source_digest(path) == UNREADABLE]
        if lost and not os.path.exists(lost[0]):
            return [NOT_FOUND]
        before, info = lines().get(job.custom_id, {}), run_info()
        old, new = shaping_fields(before), shaping_fields(job_to_json(job))
        names = [name for name in old.keys() | new.keys() if old and old.get(name) != new.get(name)]
        models = info.get("models")
        if isinstance(models, dict) and fingerprint(job.model) not in models.values():
            names.append("model")
        names += _settings(info, config)
        if not names and job.images:
            names.append("source image")
        return sorted(names) or [UNKNOWN]

    return of


def _settings(info: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    flags = info.get("flags")
    for name, row in SETTINGS.items():
        before = flags.get(name) if isinstance(flags, dict) else None
        if not (isinstance(row.pixels, InKey) and isinstance(before, dict)):
            continue
        if before.get("value") != portable(in_config(name, config)):
            yield name
