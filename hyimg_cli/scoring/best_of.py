"""Find the best of a line's candidates: draw drafts, score, pick, and draw the picked in full.

    OUT/drafts    a run of every candidate in few steps: whatever stops it, it resumes
    the model is released, the scorers look at the drafts one after the other
    OUT           a run of the picked candidates, each with its seed and its draft's text
    the scorers look at those, too; a final that a gate rejects makes way for the next candidate

Without drafts OUT is a run of every candidate in full. What is done is found by files alone: the
same command goes on wherever it was stopped.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hyimg_cli.addresses import address_of
from hyimg_cli.engine.chains import refuse_links
from hyimg_cli.engine.run import OnEvent
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import UsageError
from hyimg_cli.journal.candidates import Candidate
from hyimg_cli.journal.picks import (
    DRAFTS,
    ScoresFile,
    read_choices,
    write_candidates,
    write_picks,
)
from hyimg_cli.journal.texts_file import note_of
from hyimg_cli.manifest.manifest import Manifest, read_manifest
from hyimg_cli.manifest.resolved import lines_beside
from hyimg_cli.models import registry
from hyimg_cli.scoring.ask import Questions
from hyimg_cli.scoring.candidates import all_in, read_pool, score_candidates
from hyimg_cli.scoring.found_regions import planned
from hyimg_cli.scoring.pick import Rule, pick, rule_of
from hyimg_cli.scoring.runs_in_turn import RunsInTurn
from hyimg_cli.scoring.scorers import Scorer, scorers_of
from hyimg_cli.settings.config import settings_of
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Remark
from hyimg_cli.spec.job import ImageJob, Job, SizeRequest

Picks = list[dict[str, Any]]


@dataclass
class BestOf(RunsInTurn):
    """Runs `hyimg generate … --score … --pick M`."""

    on_event: OnEvent
    scorers: Sequence[Scorer] = ()

    def __post_init__(self) -> None:
        """Raise UsageError for settings that exclude each other, before anything is drawn."""
        config = self.request.config
        self.scorers, self._rule = judged_by(self.request)
        self._out, self._steps = config.output.folder, config.candidates.draft_steps
        # Candidates without a value are scored again once, not at each step.
        self._asks_again = self.request.policy.retry_failed
        self._questions = Questions(config)
        if any(one.asks for one in self.scorers):
            self._new_session = self._questions.session_for

    def run(self) -> Picks:
        """Draw, score and pick, and draw the picked in full."""
        with self._questions:
            return self._run()

    def _run(self) -> Picks:
        self.draw(first_folder(self.request), self._candidates, self.on_event)
        picks, before = self._pick(), set[str]()
        # A run that ended early, by --fail-fast, leaves some candidates undrawn; so does this.
        while (missing := {name for one in picks for name in one["missing"]}) - before:
            before = missing
            chosen = {name for one in picks for name in one["picked"]}
            self.draw(self._out, partial(self._finals, chosen), self.on_event)
            picks = self._pick()
        return picks

    def _pick(self) -> Picks:
        """Score what has no score yet, and pick; the picks are on disk afterwards."""
        pool, finals = read_pool(self._out)
        every = [*all_in(pool), *(finals or {}).values()]
        config = self.request.config.candidates
        again, self._asks_again = self._asks_again, False
        with ScoresFile(self._out) as file:
            score_candidates(
                every,
                self.scorers,
                file,
                config,
                self._remark,
                retry_failed=again,
                questions=self._questions,
            )
        picks = pick(pool, finals, file.means(), self._rule, read_choices(self._out))
        write_picks(self._out, picks)
        return picks

    def _candidates(self, jobs: Sequence[Job]) -> list[Job]:
        """Return every candidate, as a draft if drafts were requested."""
        made = candidates_of(self.request, jobs)
        write_candidates(self._out, lines_beside(jobs, self._out))
        return made

    def _finals(self, chosen: set[str], jobs: Sequence[Job]) -> list[Job]:
        """Return the chosen candidates in full, and the ones drawn in full before."""
        pool, finals = read_pool(self._out)
        drafts = {one.custom_id: one for one in all_in(pool)}
        wanted = chosen | ((finals or {}).keys() & drafts.keys())
        revision = self.request.config.model.revision
        return [
            with_text(job, drafts[job.custom_id], revision)
            for job in jobs
            if job.custom_id in wanted and isinstance(job, ImageJob)
        ]

    def _remark(self, text: str) -> None:
        self.on_event(Remark(text, "info"))


def draw_best(
    manifest: Manifest | Path | str, config: RunConfig, *, on_event: OnEvent = lambda _: None
) -> Picks:
    """Draw, score and pick the best of a manifest's candidates, like `hyimg generate --score`.

    Returns the lines of picks.jsonl. `config.candidates` has the rule; `n` is in `config.sampling`.
    """
    if not isinstance(manifest, Manifest):
        manifest = read_manifest(Path(manifest))
    return BestOf(RunRequest(manifest, config, settings_of(config)), on_event).run()


def first_run(request: RunRequest, *, with_drafts: bool = False) -> RunRequest:
    """Return the run with which a request begins: of all its candidates, as drafts if requested.

    Without candidates it is the request itself, in which each edit whose region a draft finds has
    one, or is drawn as a whole; `with_drafts`: beside its draft. Raises UsageError for settings
    that exclude each other.
    """
    config = request.config
    if not config.candidates.is_asked_for:
        return planned(request, with_drafts=with_drafts)
    judged_by(request)
    config = replace(config, output=replace(config.output, folder=first_folder(request)))
    return replace(request, config=config, change=partial(candidates_of, request))


def judged_by(request: RunRequest) -> tuple[Sequence[Scorer], Rule]:
    """Return the scorers of a request's candidates, and the rule that picks by them.

    Raises UsageError for settings that exclude each other.
    """
    config, why = request.config, ""
    out = config.output.folder
    scorers = scorers_of(config.candidates, config.model)
    rule = rule_of(config.candidates, {one.name: one.recorded for one in scorers})
    if not scorers and config.candidates.repeat > 1:
        why = "--repeat repeats scores: add --score, or --n 3 to draw several pictures of each line"
    elif not scorers:
        why = "drafts need a scorer to choose by: add --score"
    elif address_of(out):
        why = "candidates are scored in a folder on this machine, but -o is an address"
    elif request.selection.shard or not request.policy.resume:
        why = "candidates of a line are compared with each other: remove --shard and --no-resume"
    elif request.selection.asked.conditions:
        why = "candidates are selected by the rule that picks them: give ids to --select"
    elif not config.candidates.draft_steps and (out / DRAFTS).is_dir():
        why = f"{out} holds drafts: add the same --draft-steps, or choose another -o"
    if why:
        raise UsageError(why, code="usage.candidates")
    return scorers, rule


def first_folder(request: RunRequest) -> Path:
    """Return the folder of all candidates."""
    out = request.config.output.folder
    return out / DRAFTS if request.config.candidates.draft_steps else out


def candidates_of(request: RunRequest, jobs: Sequence[Job]) -> list[Job]:
    """Return every candidate, as a draft if drafts were requested. Raises UsageError."""
    for job in jobs:
        if not isinstance(job, ImageJob):
            what, hint = "this is a video, but scorers accept only pictures", "remove the videos"
            raise UsageError(what, where=job.source_line, hint=hint, code="usage.videos")
    refuse_links(jobs, "candidates are chosen after all of them are drawn")
    steps = request.config.candidates.draft_steps
    return [draft_of(job, steps) if steps else job for job in jobs]


def draft_of(job: Job, steps: int) -> Job:
    """Return a job with fewer steps, without a step cache.

    Raises UsageError if they are not fewer.
    """
    if steps >= job.num_inference_steps:
        what = f"a draft of {steps} steps of a job of {job.num_inference_steps} saves nothing"
        hint = "give fewer --draft-steps, or leave them out"
        raise UsageError(what, where=job.source_line, hint=hint, code="usage.draft-steps")
    lineage = replace(job.lineage, draft_of=job.custom_id)
    return replace(job, num_inference_steps=steps, step_cache=None, lineage=lineage)


def with_text(job: ImageJob, draft: Candidate, revision: str | None) -> ImageJob:
    """Return a job with its draft's text, fed in the same way.

    It has the same pixels as if it wrote the text itself.
    """
    result = draft.result
    text, ids = result.get("cot_text"), result.get("cot_token_ids")
    if not job.writes_text or ids is None:
        return job
    facts = {"key": result["key"], **(result.get("written") or {})}
    note = note_of(job, ids, str(text), facts)
    size = job.size
    if size.is_auto:  # the text chose it
        buckets = registry.model_card(job.model, revision).buckets
        own = [one.size for one in buckets if one.ratio_index == result.get("ratio_index")]
        size = SizeRequest(own[0].height, own[0].width) if own else size
    written = json.dumps(note, sort_keys=True)
    return replace(job, size=size, cot_token_ids=tuple(ids), written_json=written)
