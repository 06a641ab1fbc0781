"""Assign jobs to shards and put them in order. No torch.

Jobs that share work stay together, and no shard gets much more than its part. Each shard computes
the whole assignment from the manifest alone, without reading files or results. So all shards, and a
resumed one, get the same assignment.

Order: jobs of one model and size together, jobs with the same images, texts or prompts next to each
other.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from graphlib import TopologicalSorter
from typing import TypeVar

from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.plan import Group, Plan, VideoGroup
from hyimg_cli.spec.work import picture_work, video_work

# A written token needs a forward of its own, which costs about as much as this many rows of a
# denoise step.
_ROWS_OF_A_TOKEN = 256
_ASSUMED_TEXT = 256
Key = TypeVar("Key", bound=Hashable)
One = TypeVar("One")

# Everything in a job that determines its text, and its size class. It holds within one run while
# the source files are unchanged: checkpoint, precision and ranks are the same for the whole run.
TextIdentity = tuple[Hashable, str]
# The size class of jobs that end with a text.
TEXT_CLASS = "text"


def text_identity(job: ImageJob, card: ModelCard) -> TextIdentity | None:
    """Return the identity of a job's text; None if it writes none."""
    inputs = job.text_inputs
    return None if inputs is None else (inputs, size_class_of(job, card))


def text_of(job: Job) -> Hashable:
    """Return an equal key for jobs of a group with the same text; for a video, its prompt."""
    return job.prompt if isinstance(job, VideoJob) else job.text_inputs or job.custom_id


def size_class_of(job: ImageJob, card: ModelCard) -> str:
    """Return the size in which the job will be drawn, or `auto`; `text` if nothing is drawn."""
    if not job.draws:
        return TEXT_CLASS
    bucket = card.bucket_of(job.size)
    return "auto" if bucket is None else str(bucket.size)


def make_plan(jobs: Sequence[Job], card_of: Callable[[str], ModelCard]) -> Plan:
    """Put every job in one group, by model and size class, or by size and frames for videos.

    Models, groups, and sets of source images or prompts are ordered by their first job, and so are
    jobs that write the same text within a set. Otherwise the manifest's order holds. So a model is
    loaded once, and each image is encoded and each text written once in a row. In a group, jobs
    that need no text come first, because they wait for nothing. All of this holds for the jobs that
    edit no result of others; those that do follow, in the same order. `card_of` is called once per
    picture model.
    """
    depths, card = depths_of(jobs), cache(card_of)
    if not depths:  # of a million jobs, another list takes 8 MB
        return Plan(tuple(_groups(jobs, card)))
    waves = group_by(jobs, lambda job: depths.get(job.custom_id, 0))
    return Plan(tuple(one for depth in sorted(waves) for one in _groups(waves[depth], card)))


def depths_of(jobs: Sequence[Job]) -> dict[str, int]:
    """Return how many of the jobs must be done one after the other before each one, by custom_id.

    Jobs without links are left out.
    """
    linked = {job.custom_id: job for job in jobs if job.links}
    if not linked:
        return {}
    names, depths = {job.custom_id for job in jobs}, dict[str, int]()
    before = {
        name: [one.custom_id for one in job.made_from if one.custom_id in names]
        for name, job in linked.items()
    }
    for name in TopologicalSorter(before).static_order():
        depths[name] = 1 + max((depths[one] for one in before.get(name, ())), default=-1)
    return depths


def waves_of(plan: Plan) -> list[Plan]:
    """Return the parts of a plan that run one after the other, because of links between jobs."""
    depths = depths_of(plan.jobs)
    waves = group_by(plan.groups, lambda group: depths.get(group.jobs[0].custom_id, 0))
    return [replace(plan, groups=tuple(groups)) for groups in waves.values()]


def _groups(jobs: Sequence[Job], card: Callable[[str], ModelCard]) -> Iterator[Group | VideoGroup]:
    """Yield the groups of jobs that do not need each other."""
    by_model = group_by(jobs, lambda job: (isinstance(job, VideoJob), job.model))
    for (_, model), of_model in by_model.items():
        pictures = [job for job in of_model if isinstance(job, ImageJob)]
        by_size = group_by(pictures, lambda job: size_class_of(job, card(job.model)))
        for size_class, members in by_size.items():
            if size_class == TEXT_CLASS:  # all questions about a picture, written or chosen
                by_images = side_by_side(members, lambda job: job.images)
                order = side_by_side(by_images, lambda job: (job.images, text_of(job)))
                yield Group(model, size_class, order)
                continue
            in_order = sorted(members, key=lambda job: job.writes_text)
            by_source = side_by_side(in_order, lambda job: (job.writes_text, job.lora, job.images))
            order = side_by_side(
                by_source, lambda job: (job.writes_text, job.lora, job.images, text_of(job))
            )
            yield Group(model, size_class, order)
        # A LoRA is read once for all jobs that use it.
        films = [job for job in of_model if isinstance(job, VideoJob)]
        by_lora = side_by_side(films, lambda job: job.lora)
        alike = group_by(by_lora, lambda job: (job.lora, job.size, job.num_frames))
        for (_, size, frames), films in alike.items():
            by_prompt = side_by_side(films, lambda job: (job.prompt, job.negative_prompt))
            yield VideoGroup(model, f"{size}, {frames} frames", by_prompt)


def side_by_side(ones: Iterable[One], key: Callable[[One], Hashable]) -> tuple[One, ...]:
    """Return all items, with equal ones by `key` moved to the first of them."""
    # By hashes: a million keys would take more memory than their jobs.
    places: dict[int, int] = {}
    return tuple(sorted(ones, key=lambda one: places.setdefault(hash(key(one)), len(places))))


def group_by(ones: Iterable[One], key: Callable[[One], Key]) -> dict[Key, list[One]]:
    """Return the items by `key`, in the order in which each key first appears."""
    by_key: dict[Key, list[One]] = {}
    for one in ones:
        by_key.setdefault(key(one), []).append(one)
    return by_key


@dataclass(frozen=True)
class Shard:
    """Shard `index` of `count`, from 1, with its jobs in manifest order, of `of_jobs`.

    Also has its part of all planned work, and the largest shard's work over the mean.
    """

    index: int
    count: int
    jobs: tuple[Job, ...]
    of_jobs: int
    part: float
    largest: float


def shard_of(jobs: Sequence[Job], index: int, count: int, weigh: Callable[[Job], int]) -> Shard:
    """Return the jobs of one shard. Pictures and videos are distributed separately."""
    own: set[int] = set()
    parts = [0.0] * count
    for kind in (ImageJob, VideoJob):
        weights = {number: weigh(job) for number, job in enumerate(jobs) if isinstance(job, kind)}
        pieces = _pieces(jobs, weights, count)
        weighed = [sum(weights[number] for number in piece) for piece in pieces]
        # Named by their first job's id, which does not depend on the manifest's path.
        names = (jobs[piece[0]].custom_id for piece in pieces)
        dealt = deal(list(zip(names, weighed, strict=True)), count)
        for piece, weight, shard in zip(pieces, weighed, dealt, strict=True):
            parts[shard] += weight
            if shard == index - 1:
                own.update(piece)
    chosen, whole = tuple(jobs[number] for number in sorted(own)), sum(parts) or 1.0
    part, largest = parts[index - 1] / whole, max(parts) * count / whole
    return Shard(index, count, chosen, len(jobs), part, largest)


def deal(pieces: Sequence[tuple[str, int]], count: int) -> list[int]:
    """Return the shard, from 0, of each piece, given as name and weight.

    Heavy pieces come first. Each goes to the shard that it prefers (by a hash of both) among the
    shards with room for it below the mean, else to the least loaded one.
    """
    import numpy as np

    loads = np.zeros(count, np.int64)
    mean = math.ceil(sum(weight for _, weight in pieces) / count)
    of_shards = np.array([_hash(f"shard {shard}") for shard in range(count)], np.uint64)
    hashes = [_hash(name) for name, _ in pieces]
    found = [0] * len(pieces)
    for number in sorted(range(len(pieces)), key=lambda n: (-pieces[n][1], hashes[n], n)):
        weight = pieces[number][1]
        has_room = loads <= mean - weight
        if has_room.any():
            # Multiply by an odd number and take the upper half: every bit of both hashes counts.
            mixed = (of_shards ^ np.uint64(hashes[number])) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
            shard = int(np.argmax(np.where(has_room, mixed >> np.uint64(1), 0)))
        else:
            shard = int(np.argmin(loads))
        found[number] = shard
        loads[shard] += weight
    return found


def planned_work(
    job: Job, card_of: Callable[[str], ModelCard], video_card_of: Callable[[str], VideoCard]
) -> int:
    """Return a job's weight: rows of a picture's forwards, or operations of a video's.

    A picture whose size the model will choose counts as a square, with a text of an assumed length.
    """
    if isinstance(job, VideoJob):
        card = video_card_of(job.model)
        film = video_work(job, card)
        forward = card.forward.flops(film.grid) or math.prod(film.grid)
        # In millions: counts stay below 2**63 whatever a manifest asks for.
        return max(1, forward * film.levels * job.branch_count // 10**6)
    work = picture_work(job, card_of(job.model))
    written = min(_ASSUMED_TEXT, job.text.max_new_tokens) if job.writes_text else 0
    return work.denoise + work.read + written * _ROWS_OF_A_TOKEN


def _pieces(jobs: Sequence[Job], weights: Mapping[int, int], count: int) -> list[list[int]]:
    """Group the weighed jobs that share a set of source pictures or a prompt, by their numbers.

    A group above a shard's part is cut into pieces of about one weight; jobs that write the same
    text stay together.
    """
    groups = group_by(weights, lambda n: (jobs[n].model, jobs[n].images or jobs[n].prompt))
    mean = sum(weights.values()) / count
    found: list[list[int]] = []
    for members in groups.values():
        whole, before = sum(weights[number] for number in members), 0
        if whole <= mean or len(members) == 1:
            found.append(members)
            continue
        pieces: dict[int, list[int]] = {}
        for number in side_by_side(members, lambda number: text_of(jobs[number])):
            pieces.setdefault(before * math.ceil(whole / mean) // whole, []).append(number)
            before += weights[number]
        found += pieces.values()
    return found


def _hash(name: str) -> int:
    """Return a hash that is the same everywhere, unlike Python's own."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
