"""Prepare a run: its jobs, their sources, and what earlier runs left to do; loads no model.

    read_jobs  lines, settings, selection
    prepare    and their sources
    find_rest  what is left to do in the folder: resume keys, room on the disk, the plan
    begin      the run itself: writes what is known before the first job

`check` and `plan` show a `preview`: all but the last step, and what loading would refuse. So what
the run refuses before its first job, they refuse in the same words. They do not ask this machine
for its devices and free memory, because the run may be for another one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.engine import runner
from hyimg_cli.engine.chains import link_jobs, refuse_links, without_lost
from hyimg_cli.engine.runner import RunRequest, Summary
from hyimg_cli.engine.sources import SourcesSeen, probe_sources, refuse_hopeless, turned_sizes
from hyimg_cli.errors import HyimgError, ManifestError, SourceImageError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.drawn_whole import DrawnWhole
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.resume import LOST, Resumption, resume
from hyimg_cli.manifest.planner import Shard, make_plan
from hyimg_cli.memory.available import configured_memory
from hyimg_cli.memory.fit import Fit, check_fit
from hyimg_cli.memory.refusals import refuse_full_disk
from hyimg_cli.models import registry
from hyimg_cli.pipelines.failures import FailureLimit, failed_job
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import JobEnded, Outcome, Remark
from hyimg_cli.spec.gc_paused import gc_paused
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.units import counted

Tell = Callable[[Remark], object]
# Every file has the IPTC property unless the user turns metadata off.
_UNMARKED = (
    "--no-metadata: the files do not say that a model made them, which the EU AI Act requires "
    "(article 50)"
)


class Refusals:
    """What a run refuses, in the order in which it finds it.

    The first is raised, unless all are collected in `found`.
    """

    def __init__(self, *, collects: bool = False) -> None:
        self.collects = collects
        self.found: list[HyimgError] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Collect an error of the block, if all are collected; the block then ends early."""
        try:
            yield
        except HyimgError as error:
            if not self.collects:
                raise
            self.found += getattr(error, "faults", None) or [error]


@dataclass(frozen=True)
class Preparation:
    """A run before its folder is opened.

    `every`: the manifest's jobs as they will be drawn; `jobs`: the selected ones, of a `shard` if
    one was selected. `faults`: of lines and settings, each with its place; `invalid`: outcomes of
    the faulty lines that the run leaves out.
    """

    request: RunRequest
    every: tuple[Job, ...]
    invalid: tuple[Outcome, ...]
    faults: tuple[HyimgError, ...]
    jobs: list[Job]
    shard: Shard | None
    sources: SourcesSeen = field(default_factory=lambda: SourcesSeen({}, {}))


@dataclass(frozen=True)
class Rest:
    """What is left to do in a folder: for a session, the `plan` of jobs whose sources are read.

    `untried`: jobs whose sources cannot be read, or will not be drawn, with the reason.
    """

    resumption: Resumption
    untried: tuple[tuple[Job, SourceImageError], ...]
    plan: Plan


@dataclass(frozen=True)
class Preview:
    """What `check` and `plan` show. `too_large`: models that do not fit into `memory_gb`.

    `rest` is None if the folder or the manifest was refused.
    """

    preparation: Preparation
    rest: Rest | None
    too_large: Mapping[str, Fit]


@dataclass(frozen=True)
class RunPlan:
    """The remaining work of a run that has begun.

    `plan`: for a session. `to_finish`: edits with saved redraws, which need no model. `ended`: jobs
    and lines that failed during preparation; `limit` counts them. If it is over, no other job runs.
    `summary` has the counts that are known before the first event.
    """

    plan: Plan
    summary: Summary
    ended: tuple[Outcome, ...]
    to_finish: tuple[ImageJob, ...]
    limit: FailureLimit


def read_jobs(
    request: RunRequest,
    refusals: Refusals,
    place: Callable[[RunConfig], RunConfig] = lambda config: config,
    tell: Tell = str,
) -> Preparation:
    """Read the jobs of a request, but not their sources.

    `place` adds what the machine of the run has, and refuses a machine without it. Raises
    ManifestError with every fault of the manifest, and UsageError.
    """
    every, invalid, faults = tuple[Job, ...](), tuple[Outcome, ...](), list[HyimgError]()
    with refusals.caught():
        good, faults = runner.examine(
            request.manifest, request.settings, finds_regions=request.finds_regions
        )
        invalid, unrecorded = runner.split_faults(request.manifest, request.settings, faults)
        every = tuple(good)
        if unrecorded:
            raise ManifestError(unrecorded, where=request.manifest.title)
    with refusals.caught():
        every = tuple(request.change(every))
    with refusals.caught():
        request = replace(request, config=place(request.config))
    with refusals.caught():
        known = DrawnWhole(run_folder(request.config.output.folder), request.config)
        every = link_jobs(every, request.config, known.settle if request.policy.resume else None)
        if known.count:
            what = f"{counted(known.count, 'edit')} drawn before from the whole source or one crop"
            tell(Remark(f"{what}; --region-size native draws the region alone", "info"))
    # The lines may be a million; only their jobs are needed from here on.
    request = replace(request, manifest=replace(request.manifest, lines=()))
    jobs, shard = list[Job](), None
    with refusals.caught():
        if request.selection.shard:
            refuse_links(every, "its source may be in another shard")
        jobs, shard = request.selection.of(every, request.config.model.revision)
        if every and not jobs:
            asked = " and ".join(map(str, request.selection.asked.conditions))
            tell(Remark(f"none of {counted(len(every), 'job')} has {asked}"))
    return Preparation(request, every, invalid, tuple(faults), jobs, shard)


def prepare(
    request: RunRequest,
    tell: Tell,
    refusals: Refusals,
    place: Callable[[RunConfig], RunConfig] = lambda config: config,
    *,
    fetches: bool = False,
) -> Preparation:
    """Read the jobs of a request and their sources, and tell what their author should know.

    `fetches`: see `probe_sources`. Raises as `read_jobs` does, and UsageError if no job has all its
    sources.
    """
    ready = read_jobs(request, refusals, place, tell)
    config = ready.request.config
    if not ready.faults:  # a faulty line may be of another kind
        for text in runner.remarks(request.settings, ready.every):
            tell(Remark(text))
    if not config.output.metadata:
        tell(Remark(_UNMARKED))
    found = probe_sources(ready.jobs, config.cache, fetches=fetches, tell=partial(_inform, tell))
    for text in () if refusals.collects else found.named():
        tell(Remark(text, "info"))
    for text in turned_sizes(found, ready.jobs):
        tell(Remark(text))
    if config.failure.max_consecutive_errors and not refusals.found:  # else each job has a line
        with refusals.caught():
            refuse_hopeless(found, ready.jobs, run_folder(config.output.folder))
    return replace(ready, sources=found)


def _inform(tell: Tell, text: str) -> None:
    tell(Remark(text, "info"))


def find_rest(ready: Preparation, folder: RunFolder) -> Rest:
    """Return what is left to do of the prepared jobs in a folder.

    Raises OutputFolderError if the folder's results are of other jobs, and StorageError if the disk
    cannot hold the remaining videos.
    """
    config, policy = ready.request.config, ready.request.policy
    found = resume(folder, ready.jobs, config, policy)
    error_of = ready.sources.error_of
    errors = {job.custom_id: error for job in found.to_run if (error := error_of(job))}
    found, errors = without_lost(found, ready.jobs, ready.every, errors, folder, config)
    untried = tuple((job, errors[job.custom_id]) for job in found.to_run if job.custom_id in errors)
    to_run = [job for job in found.to_run if job.custom_id not in errors]
    videos = [job for job in to_run if isinstance(job, VideoJob)]
    refuse_full_disk(folder.folder, videos, config)
    plan = make_plan(to_run, runner.cards(config.model.revision))
    return Rest(found, untried, replace(plan, begun=found.begun))


def preview(request: RunRequest, tell: Tell, refusals: Refusals | None = None) -> Preview:
    """Return what `check` and `plan` show of a run; loads and writes nothing, without torch.

    Raises the first error with which the run would end before its first job, unless `refusals`
    collects them all.
    """
    refusals = refusals or Refusals()
    ready = prepare(request, tell, refusals, fetches=True)
    config, rest = ready.request.config, None
    if not refusals.found:
        folder = run_folder(config.output.folder, ready.request.selection.shard)
        with refusals.caught():
            folder.refuse_unusable()
            rest = find_rest(ready, folder)
    for model in sorted({job.model for job in (rest.plan.jobs if rest else ready.jobs)}):
        with refusals.caught():
            for text in _check_headers([model], config):
                tell(Remark(text))
    return Preview(ready, rest, dict(too_large(rest.plan, config)) if rest else {})


def _check_headers(models: Iterable[str], config: RunConfig) -> list[str]:
    store = DiskStore(config.cache.folder, config.cache.budget_bytes)
    return registry.check_headers(models, config.model, store)


def too_large(plan: Plan, config: RunConfig) -> Iterator[tuple[str, Fit]]:
    """Yield each model that does not fit into `memory_gb`, which may be of another machine."""
    there = configured_memory(config, replicas=runner.replicas_of(plan, config))
    for model in dict.fromkeys(group.model for group in plan.groups if there is not None):
        assert there is not None, "no model is tried without a size"
        found = check_fit(model, plan.jobs_of_model(model), config, there)
        if not found.is_enough:
            yield model, found


@gc_paused()
def begin(ready: Preparation, folder: RunFolder) -> RunPlan:
    """Return the remaining work, and record what is known before the first job.

    These are the invalid lines and the jobs whose sources cannot be read. Raises as `find_rest`
    does, and CheckpointError for an incomplete checkpoint, before anything is written. That of a
    single model is compared as it loads, which is before the first job, too.
    """
    request, config = ready.request, ready.request.config
    for model in sorted({job.model for job in ready.jobs}):
        registry.fingerprint(model, config.model.revision)
    found = find_rest(ready, folder)
    models = {group.model for group in found.plan.groups}
    if len(models) > 1:
        _check_headers(models, config)
    rest = found.resumption
    # A run without resume does not use anything that an earlier run left.
    begun = rest.done if request.policy.resume else [job.custom_id for job in rest.to_run]
    folder.drop_latents(begun)
    folder.supersede(rest.former)
    folder.write_resolved(ready.every)
    for line in ready.invalid:
        # Only once: a resumed run with the same message adds no line.
        earlier = rest.results.get(line.custom_id, {}).get("error") or {}
        if line.error and earlier.get("message") != line.error.message:
            folder.append(line)
    untried = list[Outcome]()
    limit = FailureLimit(config.failure.for_run(len(rest.to_run)))
    for job, error in found.untried:
        if not limit.is_over:
            attempt = folder.attempts[job.custom_id] + 1
            untried.append(failed_job(job, config, attempt, error))
            folder.append(untried[-1])
            if error.code != LOST:  # one fault is not as many as there are jobs after it
                limit.add(JobEnded(untried[-1]))
    summary = Summary(
        noun=runner.noun_of(found.plan.jobs),
        failed=len(rest.failed_before) + len(untried),
        invalid=len(ready.invalid),
        skipped=len(rest.done),
        left=len(found.plan.jobs) + len(rest.to_finish),
    )
    for name in rest.done:
        summary.count_edit(rest.results[name].get("edit"))
    ended = (*ready.invalid, *untried)
    return RunPlan(found.plan, summary, ended, tuple(rest.to_finish), limit)
