"""Settings that one kind of job alone reads, and a manifest has none of."""

from collections.abc import Iterator, Mapping, Sequence

from hyimg_cli.manifest.layers import Setting
from hyimg_cli.settings.table import KNOBS, JobKind
from hyimg_cli.spec.job import ImageJob, Job, VideoJob

_KINDS: tuple[tuple[JobKind, type[Job]], ...] = (("pictures", ImageJob), ("videos", VideoJob))
# Flags that are not switched off by a `no` in front.
_OFF = {"require_kv_reuse": "--allow-recompute", "drop_think": "--keep-think"}


def without_effect(settings: Mapping[str, Setting], jobs: Sequence[Job]) -> Iterator[str]:
    """A sentence for each kind of job that settings were given for and `jobs` has none of."""
    for noun, kind in _KINDS:
        if not jobs or any(isinstance(job, kind) for job in jobs):
            continue
        asked = (settings[knob.name] for knob in KNOBS if knob.only == noun)
        found = [_as_given(one) for one in asked if one.origin not in ("default", "model")]
        if found:
            verb = "concerns" if len(found) == 1 else "concern"
            yield f"{', '.join(found)} {verb} {noun} only; this manifest has none"


def _as_given(setting: Setting) -> str:
    """What the user wrote: the flag, the variable, or the recipe's key."""
    if setting.origin == "environment":
        return f"HYIMG_{setting.name.upper()}"
    if setting.origin == "recipe":
        return f"{setting.name} of the recipe"
    name = setting.name.replace("_", "-")
    return _OFF.get(setting.name, f"--no-{name}") if setting.value is False else f"--{name}"
