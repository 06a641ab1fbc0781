"""Find the regions of edits by drafts of the whole picture, and draw them at their own resolution.

    OUT/regions    a run of a draft in few steps for each edit that gives no region
    OUT            a run of the edits: each in the box that its draft changed, or in two

As for candidates, what is done is found by files alone: the same command goes on wherever it was
stopped. A draft that changed the whole picture, or nothing, leads to a drawing of the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from hyimg_cli.addresses import address_of
from hyimg_cli.engine.preparation import Preparation, Refusals, read_jobs
from hyimg_cli.engine.run import OnEvent
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import UsageError
from hyimg_cli.finishing.crops import Crop, around, crops_of, shared_out
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.media import masks
from hyimg_cli.media.images import size_of
from hyimg_cli.models import registry
from hyimg_cli.scoring.runs_in_turn import RunsInTurn
from hyimg_cli.spec.events import Remark
from hyimg_cli.spec.job import ImageJob, Job, Size, SizeRequest
from hyimg_cli.spec.options import Box, KeepOutside, Region, boxes_text
from hyimg_cli.spec.units import counted

REGIONS = "regions"
_PART_OF_STEPS, _FEWEST_STEPS = 5, 2
# A draft is less precise than the drawing: its box grows by a part of its long side, and at least
# by this part of the photograph's.
_GROWN, _LEAST = 0.12, 0.008
# A crop that is larger than this part of the photograph gains too little.
_MOST = 0.6

Results = Mapping[str, Mapping[str, Any]]


@dataclass
class FoundRegions(RunsInTurn):
    """Runs `hyimg generate … --region-size native` without regions.

    `on_draft`: gets the events of the drafts.
    """

    on_event: OnEvent
    on_draft: OnEvent

    def __post_init__(self) -> None:
        """Raise UsageError for what drafts exclude, before anything is drawn."""
        refuse_without_drafts(self.request)
        self.request = replace(self.request, finds_regions=True)

    def run(self) -> None:
        """Draw the drafts, then the edits."""
        out = self.request.config.output.folder
        if any(map(_is_unfound, _read(self.request).jobs)):
            said = f"drafts of the whole find the regions; they are in {out / REGIONS}"
            self.on_event(Remark(said, "info"))
            self.draw(out / REGIONS, _drafts, self.on_draft)
            if self.summaries[-1].left:  # ended early, by --fail-fast
                return
        self.draw(out, partial(_edits, self.request), self.on_event)


def refuse_without_drafts(request: RunRequest) -> None:
    """Raise UsageError for a run whose drafts would not be where its edits look for them."""
    why = ""
    if address_of(request.config.output.folder):
        why = "drafts find the regions in a folder on this machine, but -o is an address"
    elif request.selection.shard:
        why = "drafts find the regions of a whole run: remove --shard"
    if why:
        raise UsageError(why, hint="give regions", code="usage.regions")


def finds_regions(request: RunRequest) -> bool:
    """Return True if a draft has to find the region of one of the request's edits."""
    is_asked = request.config.outside.region_size == "native" or any(
        "region_size" in line.given and line.fields["region_size"] == "native"
        for line in request.manifest.lines
    )
    return is_asked and any(map(_is_unfound, _read(request).every))


def planned(request: RunRequest, *, with_drafts: bool) -> RunRequest:
    """Return the run that `check` and `plan` show, in which no region remains to be found.

    Where it is not known yet, as many crops are drawn as may be. `with_drafts`: a draft that
    is still to be drawn is a job of its own.
    """
    if not finds_regions(request):
        return request
    refuse_without_drafts(request)
    return replace(request, change=partial(_planned, request, with_drafts), finds_regions=True)


def _read(request: RunRequest) -> Preparation:
    return read_jobs(replace(request, finds_regions=True), Refusals(collects=True))


def _is_unfound(job: Job) -> bool:
    return isinstance(job, ImageJob) and job.finds_region


def _drafts(jobs: Sequence[Job]) -> list[Job]:
    return [_draft_of(job) for job in jobs if isinstance(job, ImageJob) and job.finds_region]


def _draft_of(job: ImageJob) -> ImageJob:
    """Return the draft: the whole picture in few steps, without gates."""
    assert job.outside is not None, "the source is kept"
    steps = max(_FEWEST_STEPS, ceil(job.num_inference_steps / _PART_OF_STEPS))
    outside = KeepOutside(kept_source=job.outside.kept_source)
    return replace(
        job,
        num_inference_steps=min(steps, job.num_inference_steps),
        step_cache=None,
        outside=outside,
        finds_region=False,
        lineage=replace(job.lineage, draft_of=job.custom_id),
    )


def _edits(request: RunRequest, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with the regions that were found."""
    known = _results(request)
    return [
        _in_region(job, known.get(job.custom_id), request)
        if isinstance(job, ImageJob) and job.finds_region
        else job
        for job in jobs
    ]


def _planned(request: RunRequest, with_drafts: bool, jobs: Sequence[Job]) -> list[Job]:
    known, found = _results(request), list[Job]()
    for job in jobs:
        if not (isinstance(job, ImageJob) and job.finds_region):
            found.append(job)
        elif job.custom_id in known:
            found.append(_in_region(job, known[job.custom_id], request))
        else:
            draft = replace(_draft_of(job), custom_id=f"{job.custom_id}.draft")
            most = _at_most(job, request.config.model.revision)
            found += [*([draft] if with_drafts else []), most]
    return found


def _folder(request: RunRequest) -> Path:
    return request.config.output.folder / REGIONS


def _results(request: RunRequest) -> Results:
    """Return the drafts' lines by id."""
    folder = RunFolder(_folder(request))
    lines = folder.results() if folder.is_run else {}
    return {name: line for name, line in lines.items() if line["status"] == "done"}


def _at_most(job: ImageJob, revision: str | None) -> ImageJob:
    """Return a job that costs as much as any that its draft may lead to: of the most crops."""
    size, whole = size_of(job.kept_image), replace(job, finds_region=False)
    sizes = registry.model_card(job.model, revision).crop_sizes()
    if job.writes_text or not sizes:
        return whole
    drawn, middle = max(sizes, key=lambda one: one.height * one.width), size.width // 2
    halves = (0, 0, middle, size.height), (middle, 0, size.width, size.height)
    return replace(whole, crops=halves, size=SizeRequest(drawn.height, drawn.width))


def _in_region(job: ImageJob, draft: Mapping[str, Any] | None, request: RunRequest) -> ImageJob:
    """Return a job with the region that its draft changed; without one if it is not a part."""
    whole = replace(job, finds_region=False)
    if draft is None:
        return replace(whole, draft="there is no draft that could find a region: drawn as a whole")
    edit, size = draft["edit"], size_of(job.kept_image)
    if edit["kind"] != "local" or edit["box"] is None:
        why = {"none": "nothing", "background": "the background"}.get(edit["kind"])
        why = why or f"the whole picture ({', '.join(edit['reasons'])})"
        return replace(whole, draft=f"a draft changed {why}: drawn as a whole")
    sizes = registry.model_card(job.model, request.config.model.revision).crop_sizes()
    boxes = [_grown(edit["box"], size)]
    crops = crops_of(boxes, size, sizes)
    matte = None if job.writes_text else masks.levels_in(_folder(request) / edit["mask"])
    if matte is not None:
        apart = [_grown(part, size) for part in masks.parts_of(matte)]
        if len(several := crops_of(apart, size, sizes)) > 1:
            shares = shared_out(apart, [crop.box for crop in several])
            grouped = [around(own) for own in shares if own]
            if len(grouped) == len(several) and not masks.do_overlap(grouped):
                boxes, crops = grouped, several
    if not crops or sum(map(_area, crops)) > _MOST * size.width * size.height:
        return replace(whole, draft="a draft changed most of the picture: drawn as a whole")
    assert job.outside is not None, "the source is kept"
    region, drawn = boxes_text(boxes), crops[0].drawn
    return replace(
        whole,
        outside=replace(job.outside, region=Region(region)),
        crops=tuple(crop.box for crop in crops),
        size=SizeRequest(drawn.height, drawn.width),
        draft=f"a draft changed {counted(edit['regions'], 'part')} in {region}",
    )


def _area(crop: Crop) -> int:
    left, top, right, bottom = crop.box
    return (right - left) * (bottom - top)


def _grown(box: Sequence[int], size: Size) -> Box:
    left, top, right, bottom = box
    longest = max(size.width, size.height)
    more = ceil(max(_GROWN * max(right - left, bottom - top), _LEAST * longest))
    return (
        max(0, left - more),
        max(0, top - more),
        min(size.width, right + more),
        min(size.height, bottom + more),
    )
