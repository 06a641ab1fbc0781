"""The request for a run, and its jobs; no model is loaded here."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from hyimg_cli.engine.chains import refuse_links
from hyimg_cli.errors import HyimgError, JobError, ManifestError, UsageError
from hyimg_cli.journal.edit_counts import EditCounts
from hyimg_cli.journal.resume import ResumePolicy
from hyimg_cli.journal.selection import LEFT, STATES, Chosen, Facts, chosen, facts_in
from hyimg_cli.manifest import planner
from hyimg_cli.manifest.chains import links_of, unbroken
from hyimg_cli.manifest.line import fault
from hyimg_cli.manifest.manifest import Manifest, failed_lines, in_line_order
from hyimg_cli.manifest.output_names import name_files
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.manifest.unused_settings import without_effect
from hyimg_cli.manifest.written import REWRITTEN
from hyimg_cli.memory.refusals import refuse_settings
from hyimg_cli.models import registry
from hyimg_cli.pipelines.failures import failed_line
from hyimg_cli.settings.config import Setting, build_run_config, settle
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.events import Event, JobEnded, JobStarted, Outcome
from hyimg_cli.spec.gc_paused import gc_paused
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.units import counted


@dataclass(frozen=True)
class Selection:
    """Which jobs to run: matching ones, then one shard (counted from 1), then the first few.

    `results`: the facts of earlier results by id, for conditions on them.
    """

    asked: Chosen = field(default_factory=Chosen)
    limit: int | None = None
    shard: tuple[int, int] | None = None
    results: Mapping[str, Facts] = field(default_factory=dict)

    def of(
        self, jobs: Sequence[Job], revision: str | None = None
    ) -> tuple[list[Job], planner.Shard | None]:
        """Return the chosen jobs in manifest order, and their shard if one was chosen.

        Raises UsageError if the patterns match no job. Conditions may hold for none.
        """
        named = Chosen(self.asked.patterns)
        found = [job for job in jobs if named.takes(job.custom_id)]
        if jobs and not found:
            hint = f"the first id is {jobs[0].custom_id!r}; * matches anything"
            statuses = [name for name in self.asked.patterns if name in STATES]
            if statuses:
                hint = f"did you mean --select status={statuses[0]}? {hint}"
            patterns = " ".join(map(repr, self.asked.patterns))
            raise UsageError(
                f"--select {patterns} matches none of {counted(len(jobs), 'job')}", hint=hint
            )
        known = self.results
        found = [j for j in found if self.asked.takes(j.custom_id, known.get(j.custom_id, LEFT))]
        if self.shard is None:
            return found[: self.limit], None
        of, of_video = cards(revision), video_cards(revision)
        weigh = partial(planner.planned_work, card_of=of, video_card_of=of_video)
        shard = planner.shard_of(found, *self.shard, weigh)
        return list(shard.jobs[: self.limit]), shard


def selection_of(
    texts: Sequence[str],
    limit: int | None,
    shard: tuple[int, int] | None,
    folder: Path,
    policy: ResumePolicy,
) -> tuple[Selection, ResumePolicy]:
    """Return the jobs that texts of --select take, by the results in `folder`, and the policy.

    Failed jobs that are selected as such run again. Raises UsageError for conditions without
    meaning, and for conditions on results together with a shard.
    """
    asked = chosen(texts)
    if asked.conditions and shard:
        what = "--select by results and --shard cannot be used together"
        hint = "results change while shards run: select ids, or leave --shard out"
        raise UsageError(what, hint=hint, code="usage.select")
    results = facts_in(folder) if asked.conditions else {}
    retries = policy.retry_failed or asked.retries
    return Selection(asked, limit, shard, results), replace(policy, retry_failed=retries)


@dataclass(frozen=True)
class RunRequest:
    """The request for one run: manifest, settings, selection, resume policy.

    `change`: maps the manifest's jobs to the ones that are drawn instead. `finds_regions`: it also
    gives regions to the jobs whose regions a draft finds; otherwise these are refused.
    """

    manifest: Manifest
    config: RunConfig
    settings: Mapping[str, Setting]
    selection: Selection = field(default_factory=Selection)
    policy: ResumePolicy = field(default_factory=ResumePolicy)
    change: Callable[[Sequence[Job]], Sequence[Job]] = tuple
    finds_regions: bool = False


@dataclass
class Summary(EditCounts):
    """Counts and times of a run, from its events.

    `left`: jobs that were planned and did not run. `failed` and the counts of edits include jobs of
    earlier runs; `invalid` counts lines that did not become jobs. `lossy`: made with a step cache.
    `prompt_tokens_computed` entered a model; `prompt_tokens_reused` had K/V from the text stage,
    another branch or another job. With several replicas, the seconds of loading, prewarming,
    embedding and compiling are those of the slowest one.
    """

    done: int = 0
    failed: int = 0
    invalid: int = 0
    skipped: int = 0
    left: int = 0
    lossy: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    load_s: float = 0.0
    prewarm_s: float = 0.0
    encode_s: float = 0.0
    compile_s: float = 0.0
    pictures_s: float = 0.0
    noun: str = "picture"
    _clock: float = field(default_factory=time.perf_counter, repr=False)
    _at_work: set[str] = field(default_factory=set, repr=False)
    _ready_s: dict[tuple[str, int | None], float] = field(default_factory=dict, repr=False)

    def add(self, event: Event) -> None:
        before, self._clock = self._clock, time.perf_counter()
        # Replicas load while others draw, so any time with a job at work belongs to the jobs.
        if self._at_work or isinstance(event, JobStarted | JobEnded):
            self.pictures_s += self._clock - before
        facts = vars(event)
        for name in ("load_s", "prewarm_s", "encode_s"):
            if name in facts:
                self._get_ready(name, facts["replica"], facts[name])
        if isinstance(event, JobStarted):
            self._at_work.add(event.custom_id)
        elif isinstance(event, JobEnded):
            self.finish(event.outcome)

    def finish(self, outcome: Outcome) -> None:
        """Count the end of a job."""
        self.done += outcome.status == "done"
        self.failed += outcome.status == "failed"
        if outcome.status == "done":
            self.count_edit(outcome.edit)
        self.lossy += outcome.step_cache is not None
        if reuse := outcome.kv_reuse:
            branches = reuse.branches
            self.prompt_tokens_computed += reuse.ar_prefill_tokens
            self.prompt_tokens_computed += sum(one.computed for one in branches)
            self.prompt_tokens_reused += reuse.ar_shared_tokens
            self.prompt_tokens_reused += sum(one.reused + one.shared for one in branches)
        self._get_ready("compile_s", outcome.replica, outcome.timings_s.get("compile", 0.0))
        self.left -= 1
        self._at_work.discard(outcome.custom_id)

    def _get_ready(self, name: str, replica: int | None, seconds: float) -> None:
        """Add seconds to `name`; replicas do this in parallel, so the slowest one's time counts."""
        self._ready_s[name, replica] = self._ready_s.get((name, replica), 0.0) + seconds
        setattr(self, name, max(s for (own, _), s in self._ready_s.items() if own == name))

    def to_json(self) -> dict[str, Any]:
        """Return the counts and times by name."""
        names = [one.name for one in fields(self) if one.name != "noun" and one.repr]
        numbers = {name: getattr(self, name) for name in names}
        return numbers | {"seconds_per_picture": self.seconds_per_picture}

    @property
    def seconds_per_picture(self) -> float | None:
        """Wall time per result of this run.

        Loading, prewarming, embedding ahead and compiling are left out.
        """
        return (self.pictures_s - self.compile_s) / self.done if self.done else None


def make_plan(
    jobs: Manifest | Sequence[Job], card_of: Callable[[str], ModelCard] | None = None
) -> Plan:
    """Return the plan of a manifest, with the checkpoint's own defaults, or of existing jobs.

    Environment and recipe are ignored. `card_of` returns a model's card; by default it is read from
    the checkpoint. Raises ManifestError with every fault of the manifest.
    """
    if isinstance(jobs, Manifest):
        jobs, _ = accept(jobs, settle({}, {}, {}))
    return planner.make_plan(jobs, card_of or cards(None))


@gc_paused()
def examine(
    manifest: Manifest, settings: Mapping[str, Setting], *, finds_regions: bool = False
) -> tuple[list[Job], list[HyimgError]]:
    """Return the valid jobs, and every fault of the manifest's text in the order of its lines.

    `finds_regions`: see `RunRequest`. Reads only files of the checkpoints, but no weights. Raises
    UsageError for settings that no job can run with.
    """
    revision = settings["revision"].value
    jobs, unresolved = resolve_jobs(manifest, settings, cards(revision), video_cards(revision))
    jobs, unnamed = name_files(manifest, jobs, settings["name"])
    config = build_run_config(settings, Path(), None)
    refuse_settings(jobs, config)
    # Faults of jobs that their checkpoint cannot run, by line: a line's jobs differ in seed only.
    unfit: dict[str, HyimgError] = {}
    line = ""
    for job in jobs:
        if job.source_line == line:
            continue
        line = job.source_line
        if isinstance(job, ImageJob) and job.finds_region and (not finds_regions or links_of(job)):
            # NOTE: a draft cannot be drawn from a result that is not there yet.
            what, hint = "the region's own resolution needs a region", "give a region"
            if names := links_of(job):
                why = f'the result of "{names[0]}" is not drawn yet, so no draft can find one'
                what, hint = f"{what}: {why}", f"{hint}, or leave out region_size"
            unfit[line] = fault("missing-field", what, f"{line}: region_size", hint)
            continue
        try:
            registry.check(job, revision, settings["video_components"].value)
        except JobError as error:
            field, slug = error.where, error.code.partition(".")[2]
            is_own = field in job.user_fields or field not in settings
            place = line if is_own else settings[field].origin
            unfit[line] = fault(slug, error.what, where=f"{place}: {field}", hint=error.hint)
    if unfit:
        jobs = [job for job in jobs if job.source_line not in unfit]
    good, broken = unbroken(jobs)
    # A fault caused by a setting is the same in every line, and is reported once.
    once = {(one.where, one.what): one for one in unfit.values()}
    return good, in_line_order(
        manifest, [*manifest.faults, *unresolved, *unnamed, *once.values(), *broken]
    )


def accept(
    manifest: Manifest, settings: Mapping[str, Setting]
) -> tuple[tuple[Job, ...], tuple[Outcome, ...]]:
    """Return the manifest's jobs, fully resolved, and the outcomes of its invalid lines.

    Raises ManifestError with every fault. With the setting `skip_invalid`, faulty lines become
    failed outcomes instead, and only faults of the whole file are raised.
    """
    jobs, faults = examine(manifest, settings)
    invalid, unrecorded = split_faults(manifest, settings, faults)
    if unrecorded:
        raise ManifestError(unrecorded, where=manifest.title)
    refuse_links(jobs, "no folder keeps that result here")
    return tuple(jobs), invalid


def split_faults(
    manifest: Manifest, settings: Mapping[str, Setting], faults: Sequence[HyimgError]
) -> tuple[tuple[Outcome, ...], list[HyimgError]]:
    """Return the outcomes of the lines that a run leaves out, and the faults that end it."""
    by_id = failed_lines(manifest, faults) if settings["skip_invalid"].value else {}
    recorded = {id(fault) for some in by_id.values() for fault in some}
    unrecorded = [fault for fault in faults if id(fault) not in recorded]
    return tuple(failed_line(name, some) for name, some in by_id.items()), unrecorded


def remarks(settings: Mapping[str, Setting], jobs: Sequence[Job]) -> Iterator[str]:
    """Yield what the author of `jobs` should know before they run.

    Settings that no job reads, and advice of the jobs' checkpoints.
    """
    revision, components = settings["revision"].value, settings["video_components"].value
    yield from without_effect(settings, jobs, cards(revision), video_cards(revision))
    yield from registry.advice(jobs, revision, components)


def cards(revision: str | None) -> Callable[[str], ModelCard]:
    """Return a look-up of model cards that reads each checkpoint once."""
    return cache(lambda model: registry.model_card(model, revision))


def video_cards(revision: str | None) -> Callable[[str], VideoCard]:
    """Return a look-up of video models' cards that reads each checkpoint once."""
    return cache(lambda model: registry.video_card(model, revision))


def rewrites(job: Job, config: RunConfig) -> bool:
    """Return True for a job whose prompt its model's rewriter would write again.

    Not for a prompt that it has written. Raises CheckpointError if the rewriter is not here.
    """
    revision = config.model.revision
    if not (isinstance(job, ImageJob) and registry.model_card(job.model, revision).rewrites):
        return False
    if REWRITTEN in json.loads(job.extra_json):
        return False
    registry.find_rewriter(job.model, revision)
    return True


def replicas_of(plan: Plan, config: RunConfig) -> int:
    """Return the number of replicas to start for a plan: no more than it has jobs."""
    return max(1, min(config.parallel.replicas, len(plan.jobs)))


def noun_of(jobs: Sequence[Job]) -> str:
    """Return what to call results of these jobs."""
    kinds = {type(job) for job in jobs}
    return "video" if kinds == {VideoJob} else "job" if VideoJob in kinds else "picture"
