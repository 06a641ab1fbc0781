"""What runs have taken, as plans need it: seconds of each phase, by calls and by units of work.

Kept in the disk cache, one small entry a run and model; what is damaged there is dropped, and told.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hyimg_cli.cache.disk import RATES, DiskStore
from hyimg_cli.engine.timing.machine import device_name
from hyimg_cli.errors import CheckpointError
from hyimg_cli.journal.keys import by_graphs, precision
from hyimg_cli.models import registry
from hyimg_cli.spec import digest
from hyimg_cli.spec.run import RunConfig

_FORMAT = 1
# Entries of all models together, a few hundred bytes each.
MOST_KEPT = 100


@dataclass(frozen=True)
class Sample:
    """Seconds that a phase took: of so many calls, for so many units of work together."""

    calls: float
    units: float
    seconds: float

    def __add__(self, other: "Sample") -> "Sample":
        return Sample(
            self.calls + other.calls, self.units + other.units, self.seconds + other.seconds
        )


@dataclass(frozen=True)
class TextLengths:
    """Tokens of the texts that some jobs have written."""

    texts: int
    mean: float
    longest: int


@dataclass(frozen=True)
class GroupTiming:
    """One group of a run.

    `limits`: most jobs at work at once, by stage, where memory had no room for more; `texts`: their
    lengths by bot task.
    """

    size_class: str
    jobs: int
    phases: Mapping[str, Sample]
    limits: Mapping[str, int] = field(default_factory=dict)
    texts: Mapping[str, TextLengths] = field(default_factory=dict)


@dataclass(frozen=True)
class RunTiming:
    """One model's part of a run.

    `phases`: what is no group's: start, load, embed, prewarm, end. `threads` of each process;
    `others`: cores that other programs had meanwhile. `is_trial`: no run, but a plan's measurement.
    """

    threads: int
    others: float
    phases: Mapping[str, Sample]
    groups: tuple[GroupTiming, ...]
    is_trial: bool = False


def conditions(model: str, config: RunConfig) -> str:
    """A digest of what decides the speed of a model's work: weights, device, precision, settings.

    Raises CheckpointError where its weights are not here.
    """
    device, dtype = precision(config.model)
    choice, parallel, batch = config.model, config.parallel, config.batch
    facts = {
        "format": _FORMAT,
        "model": registry.fingerprint(model, choice.revision),
        "device": device_name(device),
        "dtype": dtype,
        "quantization": choice.quantization,
        "graphs": by_graphs(choice, parallel.picture_ranks),
        "tiling": bool(choice.vae_use_tiling),
        "offload": choice.cpu_offload != "none",
        "balanced": choice.device == "balanced",
        "ranks": [parallel.vae_ranks, parallel.cfg_ranks, parallel.tensor_ranks],
        "batch": [batch.is_invariant, batch.prewarm, batch.prefetches_sources],
        "reuse": asdict(config.reuse),
    }
    if choice.vae_dtype != "auto" or choice.vae_channels_last:
        facts["vae"] = [choice.vae_dtype, choice.vae_channels_last]
    if choice.offloads_experts:
        facts["experts"] = "fetched"
    # Written where they are off their defaults: timings of earlier versions stay.
    beside = {
        "whole": not choice.tiles_videos,
        "groups": choice.cpu_offload == "group",
        "attention": choice.attention_backend != "native" and choice.attention_backend,
        "compiled": choice.compile_blocks,
        "tiles": choice.decode_tiles != "auto" and choice.decode_tiles,
        "batched decode": choice.batched_decode,
        "keys": choice.kv_by_slot and "slots",
        "sdpa": choice.sdpa_backend != "auto" and choice.sdpa_backend,
        "deterministic": choice.deterministic,
        "context": parallel.context_ranks > 1 and parallel.context_ranks,
    }
    return digest.of_json(facts | {name: value for name, value in beside.items() if value})


class KeptTimings:
    """Timings of earlier runs on this machine, in the disk cache."""

    def __init__(self, config: RunConfig) -> None:
        self._store = DiskStore(config.cache.folder, config.cache.budget_bytes)

    def of(self, conditions: str) -> list[RunTiming]:
        """Those under the same conditions, oldest first."""
        found = []
        for key in self._store.keys(RATES):
            if key.startswith(conditions[:32]):
                data = self._store.read(RATES, key)
                timing = None if data is None else self._read(key, data)
                found += [] if timing is None else [timing]
        return [timing for _, timing in sorted(found, key=lambda one: one[0])]

    def keep(self, conditions: str, timing: RunTiming) -> None:
        """Add one; of too many the oldest go."""
        facts = {"when": time.time_ns(), **asdict(timing)}
        data = json.dumps(facts, separators=(",", ":")).encode()
        self._store.write(RATES, conditions[:32] + digest.of_bytes(data)[:32], data)
        self._store.trim(RATES, MOST_KEPT)

    def take_notes(self) -> tuple[str, ...]:
        """What was damaged or refused since the last call."""
        return self._store.take_notes()

    def _read(self, key: str, data: bytes) -> tuple[int, RunTiming] | None:
        try:
            facts = json.loads(data)
            return int(facts["when"]), _run_timing(facts)
        except (ValueError, KeyError, TypeError, AttributeError):
            self._store.discard(RATES, key)
            return None


def _run_timing(facts: Mapping[str, Any]) -> RunTiming:
    groups = tuple(
        GroupTiming(
            str(group["size_class"]),
            int(group["jobs"]),
            _samples(group["phases"]),
            {name: int(most) for name, most in group["limits"].items()},
            {name: TextLengths(**lengths) for name, lengths in group["texts"].items()},
        )
        for group in facts["groups"]
    )
    threads, others = int(facts["threads"]), float(facts["others"])
    phases, is_trial = _samples(facts["phases"]), bool(facts["is_trial"])
    return RunTiming(threads, others, phases, groups, is_trial)


def _samples(phases: Mapping[str, Mapping[str, float]]) -> dict[str, Sample]:
    return {name: Sample(**{k: float(v) for k, v in one.items()}) for name, one in phases.items()}


def kept_timings(
    models: Iterable[str], config: RunConfig, store: KeptTimings
) -> dict[str, list[RunTiming]]:
    """What earlier runs left of each model; nothing of one whose weights are not here."""
    found: dict[str, list[RunTiming]] = {}
    for model in models:
        try:
            found[model] = store.of(conditions(model, config))
        except CheckpointError:
            found[model] = []
    return found


def summed(samples: Iterable[Sample]) -> Sample:
    """All of them as one."""
    return sum(samples, Sample(0, 0, 0))
