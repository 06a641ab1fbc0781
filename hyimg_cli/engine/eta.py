"""Estimate how long a plan takes, and how much of a run is left.

Each estimate is a sum over stages: units of work times seconds per unit.

    load      once per model: start, weights, prompts embedded ahead, prewarming, the end
    prompts   a prompt or source picture that is read; for a model that only denoises latents, a
              prompt that is encoded ahead of all jobs
    pictures  a source picture that such a model encodes ahead of all jobs
    text      a token that is written
    denoise   a latent cell in a denoise step; for a video, operations if its card counts them
    decode    a pixel that is decoded and written

A run saves its seconds per unit. The estimate of a plan uses the medians of earlier runs. A run
starts from these medians and continues with its own moving mean. This module does not need torch.
"""

import json
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from hyimg_cli.cache.disk import RATES, DiskStore
from hyimg_cli.engine.forecast import Forecast
from hyimg_cli.errors import CheckpointError
from hyimg_cli.journal.keys import precision
from hyimg_cli.journal.provenance import cpu_name
from hyimg_cli.manifest.planner import text_of
from hyimg_cli.models import registry
from hyimg_cli.settings.config import in_config
from hyimg_cli.settings.run import JobKind, RunConfig
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec import digest, events
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.plan import Begun, Group, Plan, VideoGroup
from hyimg_cli.spec.work import picture_work, video_work

# Of one model in one run: seconds per unit by stage, and tokens per text by bot task.
Rates = Mapping[str, float]
STAGES = ("load", "prompts", "pictures", "text", "denoise", "decode")
# Parts of a job's stages that are left after an event.
_WHOLE = dict.fromkeys(STAGES[1:], 1.0)
_READ, _WRITTEN, _OVER = {"prompts": 0.0}, {"text": 0.0}, dict.fromkeys(STAGES[1:], 0.0)
_FORMAT = 3
_RUNS_KEPT = 9
# Part of all units that a moving mean spans; at first, earlier runs have the same weight.
_SPAN = 0.2
# Assumed tokens of a text of unknown length, and the part left of a text that exceeds its expected
# length.
_LENGTH, _LAST_PART = 100.0, 0.05
# Seconds that a run may be late before its end counts as unknown.
_PATIENCE_S = 10.0
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass
class _Stage:
    """A stage of one model's jobs: units left, units done, and the seconds spent on them.

    `rate`: seconds per unit, a mean over the last `span` units; None if unknown.
    """

    left: float = 0.0
    done: float = 0.0
    seconds: float = 0.0
    rate: float | None = None
    span: float = 0.0
    _weight: float = 0.0
    _begun_s: float = 0.0

    def expect(self, rate: float | None) -> None:
        """Start from the rate of earlier runs; all units must have been counted."""
        self.rate, self.span = rate, _SPAN * self.left
        self._weight = 0.0 if rate is None else self.span

    def add(self, seconds: float, units: float = 0.0) -> None:
        """Add seconds, and the units that were done in them."""
        self.seconds += seconds
        self._begun_s += seconds
        if units > 0:
            self.done += units
            known_s = self._weight * (self.rate or 0.0)
            self.rate = (known_s + self._begun_s) / (self._weight + units)
            self._weight, self._begun_s = min(self._weight + units, self.span), 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds for the units that are left; None if the rate is unknown."""
        if self.left <= 1e-9 * self.span:
            return 0.0
        return None if self.rate is None else max(0.0, self.left * self.rate - self._begun_s)


@dataclass
class _JobAtWork:
    """A job's units by stage, and the part of each that is left."""

    job: Job
    units: Mapping[str, float]
    left: dict[str, float] = field(default_factory=lambda: dict(_WHOLE))


class Eta:
    """Follows a run's events: what it has done, how long that took, and what is left.

    The time between two events counts for the stage that the later event ends.
    """

    def __init__(
        self,
        plan: Plan,
        config: RunConfig,
        earlier: Mapping[str, Sequence[Rates]] | None = None,
        *,
        age_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`earlier`: rates of similar runs, by model; `age_s`: seconds since this run began."""
        self._plan, self._config, self._clock = plan, config, clock
        self._last = clock()
        self._began = self._last - age_s
        models = tuple(dict.fromkeys(group.model for group in plan.groups))
        runs = {model: (earlier or {}).get(model, ()) for model in models}
        self.runs = min(map(len, runs.values()), default=0)
        self._earlier = {model: _medians(of_model) for model, of_model in runs.items()}
        # Models whose prompts and pictures are encoded ahead of all jobs, separately from the load.
        self._encoders, ahead = set[str](), Forecast(config, 0)
        # Jobs that reuse the text of an earlier job of their group.
        self._takers: set[str] = set()
        self._stages = defaultdict[tuple[str, str], _Stage](_Stage)
        for group in plan.groups:
            self._stages[group.model, "load"].left = 1.0
            texts: set[int] = set()
            for job in group.jobs:
                if isinstance(job, ImageJob) and job.writes_text:
                    text = hash(text_of(job))
                    if text in texts:
                        self._takers.add(job.custom_id)
                    texts.add(text)
                if isinstance(job, ImageJob) and ahead.card_of(job.model).denoises_latents:
                    self._encoders.add(job.model)
                    if not plan.begun_of(job).is_denoised:
                        encodes = ahead.encodes(job)
                        self._stages[job.model, "prompts"].left += encodes["prompt_encodes"]
                        self._stages[job.model, "pictures"].left += encodes["image_encodes"]
                for name, units in self._units(job).items():
                    self._stages[job.model, name].left += units
        for model, name in product(models, STAGES):
            self._stages[model, name].expect(self._earlier[model].get(name))
        self._at_work: dict[str, _JobAtWork] = {}
        self._made: set[str] = set()
        # By model: the longest time between two events of its jobs.
        self._slowest_s: dict[str, float] = {}
        # Text lengths by model and bot task: number of texts, and their total number of tokens.
        self._texts: dict[tuple[str, str], tuple[int, int]] = {}
        self._model = next(iter(models), "")
        self._load(self._model, age_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    @property
    def unknown(self) -> tuple[str, ...]:
        """Models for which the remaining time cannot be estimated."""
        found = (model for (model, _), one in self._stages.items() if one.left_s is None)
        return tuple(dict.fromkeys(found))

    @property
    def stages_s(self) -> dict[str, float]:
        """Seconds left by stage, summed over all models with known rates."""
        found = dict.fromkeys(STAGES, 0.0)
        for (_, name), stage in self._stages.items():
            found[name] += stage.left_s or 0.0
        return found

    @property
    def left_s(self) -> float | None:
        """Seconds until the last job is done; None if unknown."""
        total, waited = sum(self.stages_s.values()), self._clock() - self._last
        if self.unknown or waited > total + _PATIENCE_S:
            return None
        # Counts down until the next event, but never to zero while work remains. A step that takes
        # longer than any before does none of the work that follows it.
        return max(total - min(waited, self._step_s), 0.1 * total)

    @property
    def _step_s(self) -> float:
        """Seconds to the next event at most: of the load, or of the slowest step so far."""
        load = self._stages[self._model, "load"]
        if load.left:
            return math.inf if load.left_s is None else load.left_s
        return self._slowest_s.get(self._model, math.inf)

    def add(self, event: events.Event) -> None:
        """Count an event."""
        now = self._clock()
        passed, self._last = now - self._last, now
        if not self._stages[self._model, "load"].left:
            before = self._slowest_s.get(self._model, 0.0)
            self._slowest_s[self._model] = max(before, passed)
        match event:
            case events.JobStarted():
                self._move(event.custom_id, "decode", passed, _WHOLE)
            case events.Progress(phase="think", done=count) if count:
                self._write(event, passed)
            case events.Progress(phase="denoise", done=step) if step:
                begun = self._plan.begun.get(event.custom_id, Begun())
                part = (event.total - step) / max(1, event.total - begun.step)
                self._move(event.custom_id, "denoise", passed, {"denoise": part})
            case events.Progress() if event.custom_id:
                stage = "denoise" if event.phase == "decode_latents" else "prompts"
                over = {"think": _READ, "denoise": _READ | _WRITTEN}.get(event.phase, {})
                self._move(event.custom_id, stage, passed, over)
            case events.JobEnded():
                self._end(event, passed)
            case events.ModelLoading():
                self._load(event.model, passed)
            case events.PromptsReady(encode_s=seconds) if self._model in self._encoders:
                self._load(self._model, passed - seconds)
                encodes = self._stages[self._model, event.what.split()[-1]]
                encodes.add(seconds, event.encoded)
                encodes.left = 0.0
            case events.GroupStarted():
                self._load(event.model, passed, is_ready=True)
            case _:
                self._load(self._model, passed)

    def rates(self) -> dict[str, Rates]:
        """Return the rates of each model that has finished a job.

        The time since the last event counts as the end of the run.
        """
        end_s = self._clock() - self._last
        found: dict[str, Rates] = {}
        for model in (model for model in self._earlier if model in self._made):
            stages = {name: self._stages[model, name] for name in STAGES}
            rates = {name: one.seconds / one.done for name, one in stages.items() if one.done}
            texts = {task: of for (name, task), of in self._texts.items() if name == model}
            if tokens := sum(of[1] for of in texts.values()):
                rates["text"] = stages["text"].seconds / tokens
            rates["load"] = rates.get("load", 0.0) + end_s
            found[model] = rates | {task: of[1] / of[0] for task, of in texts.items()}
            end_s = 0.0
        return found

    def _units(self, job: Job) -> dict[str, float]:
        """Return a job's units by stage."""
        revision, components = self._config.model.revision, self._config.model.video_components
        read = 0.0 if job.model in self._encoders else 1.0 + len(job.images)
        units = {"prompts": read, "pictures": 0.0, "text": self._length(job)}
        if self._config.output.only_texts:
            return units | {"denoise": 0.0, "decode": 0.0}
        first = self._plan.begun_of(job).step
        if isinstance(job, ImageJob):
            work = picture_work(job, registry.model_card(job.model, revision), first)
        else:
            work = video_work(job, registry.video_card(job.model, revision, components), first)
        return units | {"denoise": work.denoise, "decode": work.pixels}

    def _length(self, job: Job) -> float:
        """Return the number of tokens that a job is expected to write."""
        if not isinstance(job, ImageJob) or not job.writes_text or job.custom_id in self._takers:
            return 0.0
        return min(self._earlier[job.model].get(job.bot_task, _LENGTH), job.text.max_new_tokens)

    def _load(self, model: str, passed: float, *, is_ready: bool = False) -> None:
        """Add time that belongs to no job to a model's load, which ends if `is_ready`."""
        self._model = model
        stage = self._stages[model, "load"]
        stage.add(passed, stage.left if is_ready else 0.0)
        stage.left = 0.0 if is_ready else stage.left

    def _move(
        self, custom_id: str, stage: str, passed: float, parts: Mapping[str, float]
    ) -> _JobAtWork | None:
        """Add seconds to one stage of a job, and set the `parts` of its stages that are left.

        Return None if the plan has no such job.
        """
        job = self._plan.by_id.get(custom_id)
        if job is None:
            return None
        at = self._at_work.get(custom_id)
        if at is None:
            at = self._at_work[custom_id] = _JobAtWork(job, self._units(job))
        self._stages[job.model, stage].add(passed)
        for name, part in parts.items():
            units = at.units[name] * (at.left[name] - part)
            self._stages[job.model, name].left -= units
            self._stages[job.model, name].add(0.0, units)
            at.left[name] = part
        return at

    def _write(self, event: events.Progress, passed: float) -> None:
        """Count a token; finished texts, if any, give the expected length of its text."""
        at = self._move(event.custom_id, "text", passed, {})
        if at is not None:
            texts, tokens = self._texts.get(_kind(at.job), (0, 0))
            length = tokens / texts if texts else at.units["text"]
            part = max(_LAST_PART, 1 - event.done / max(1.0, length))
            self._move(event.custom_id, "text", 0.0, {"text": part})

    def _end(self, event: events.JobEnded, passed: float) -> None:
        """Count the end of a job; the unfinished work of a failed job does not count as done."""
        seconds, parts = (passed, _OVER) if event.is_done else (0.0, {})
        at = self._move(event.outcome.custom_id, "decode", seconds, parts)
        if at is None:
            return
        del self._at_work[at.job.custom_id]
        for name, part in at.left.items():
            self._stages[at.job.model, name].left -= at.units[name] * part
        if event.is_done:
            self._made.add(at.job.model)
        reuse = event.outcome.kv_reuse
        tokens = reuse.ar_decode_tokens + reuse.ar_surplus_tokens if reuse else 0
        if tokens:
            texts, before = self._texts.get(_kind(at.job), (0, 0))
            self._texts[_kind(at.job)] = texts + 1, before + tokens


class KeptRates:
    """Rates of the last runs on this machine, in the disk cache by model and settings."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store = DiskStore(config.cache.folder, config.cache.budget_bytes)

    def read(self, plan: Plan) -> dict[str, list[Rates]]:
        """Return by model the rates of runs with the same weights and settings, oldest first."""
        return {group.model: self._runs(_key(group, self._config)) for group in plan.groups}

    def keep(self, plan: Plan, found: Mapping[str, Rates]) -> None:
        """Add a run's rates, and drop the oldest if there are too many."""
        groups = {group.model: group for group in plan.groups}
        for model, rates in found.items():
            key = _key(groups[model], self._config)
            if key:
                runs = [*self._runs(key), rates][-_RUNS_KEPT:]
                self._store.write(RATES, key, json.dumps(runs).encode())

    def take_notes(self) -> tuple[str, ...]:
        """Return notes on entries that were damaged or refused since the last call."""
        return self._store.take_notes()

    def _runs(self, key: str) -> list[Rates]:
        data = self._store.read(RATES, key) if key else None
        try:
            runs = [] if data is None else json.loads(data)
            return [{name: float(rate) for name, rate in rates.items()} for rates in runs]
        except (ValueError, TypeError, AttributeError):
            self._store.discard(RATES, key)
            return []


def _key(group: Group | VideoGroup, config: RunConfig) -> str:
    """Return a digest of everything that determines a model's speed.

    It covers the weights, the machine, and every setting that such jobs use, except failure
    settings. The digest is empty if the weights are missing.
    """
    kind: JobKind = "pictures" if isinstance(group, Group) else "videos"
    facts = {}
    for row in SETTINGS.values():
        # Settings in the job line are covered by the unit counts, and checkpoints by their
        # fingerprint.
        is_counted = row.in_line or row.pixels == "checkpoint"
        is_other = row.table == "failure" or row.attribute == "folder"
        if not is_counted and not is_other and row.concerns(kind, denoises_latents=True):
            facts[row.name] = in_config(row.name, config)
    device, facts["dtype"] = precision(config.model)
    facts["device"] = device if facts["device"] == "auto" else facts["device"]
    facts |= {"format": _FORMAT, "machine": _processor(device)}
    components = config.model.video_components if kind == "videos" else None
    try:
        facts["weights"] = registry.fingerprint(group.model, config.model.revision, components)
    except CheckpointError:
        return ""
    return digest.of_json(facts)


def _processor(device: str) -> str:
    """Return the processor behind a kind of device, cpu or cuda, without torch."""
    if device == "cpu":
        return cpu_name()
    facts = "".join(path.read_text() for path in sorted(_GPUS.glob("*/information")))
    return next(iter(re.findall("Model:.*", facts)), device)


def _kind(job: Job) -> tuple[str, str]:
    """Return model and bot task; texts of one kind are assumed to have about the same length."""
    return job.model, job.bot_task if isinstance(job, ImageJob) else ""


def _medians(runs: Sequence[Rates]) -> Rates:
    names = dict.fromkeys(name for rates in runs for name in rates)
    return {name: statistics.median(one[name] for one in runs if name in one) for name in names}
