"""A manifest's jobs dealt to shards: what shares work stays together, and no shard gets much more
than its part.

Each shard computes the whole deal, from the manifest alone: no file is looked at, and nothing of
what is done already, so that all of them, and a resumed one, come to the same.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from hyimg_cli.manifest.planner import side_by_side, text_of
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.work import picture_work, video_work

# A written token costs a forward of its own: about as much as so many rows of a denoise step.
_ROWS_OF_A_TOKEN = 256
_ASSUMED_TEXT = 256
# Counts stay below 2**63 whatever a manifest asks for.
_VIDEO_UNIT = 10**6


@dataclass(frozen=True)
class Shard:
    """One shard of `count`, from 1: its jobs in manifest order, of `of_jobs`; its part of all
    planned work, and the largest part that any shard has over the mean.
    """

    index: int
    count: int
    jobs: tuple[Job, ...]
    of_jobs: int
    part: float
    largest: float


Weigh = Callable[[Job], int]


def shard_of(jobs: Sequence[Job], index: int, count: int, weigh: Weigh) -> Shard:
    """The jobs of one shard. Pictures and videos are dealt each by themselves."""
    own: set[int] = set()
    parts = [0.0] * count
    for kind in (ImageJob, VideoJob):
        weights = {number: weigh(job) for number, job in enumerate(jobs) if isinstance(job, kind)}
        pieces = _pieces(jobs, weights, count)
        weighed = [sum(weights[number] for number in piece) for piece in pieces]
        # Named by their first job's id, which is the same wherever the manifest lies.
        names = (jobs[piece[0]].custom_id for piece in pieces)
        dealt = deal(list(zip(names, weighed, strict=True)), count)
        for piece, weight, shard in zip(pieces, weighed, dealt, strict=True):
            parts[shard] += weight
            if shard == index - 1:
                own.update(piece)
    whole = sum(parts) or 1.0
    return Shard(
        index,
        count,
        tuple(job for number, job in enumerate(jobs) if number in own),
        len(jobs),
        parts[index - 1] / whole,
        max(parts) * count / whole,
    )


def deal(pieces: Sequence[tuple[str, int]], count: int) -> list[int]:
    """The shard, from 0, of each piece, given as name and weight.

    Heavy ones first, each goes to the shard that it prefers (by a hash of both) among those that
    have room for it under the mean, else to the one that has least.
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
            # A product by an odd number, then its upper half: each bit of both hashes counts.
            mixed = (of_shards ^ np.uint64(hashes[number])) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
            shard = int(np.argmax(np.where(has_room, mixed >> np.uint64(1), 0)))
        else:
            shard = int(np.argmin(loads))
        found[number] = shard
        loads[shard] += weight
    return found


def planned_work(
    card_of: Callable[[str], ModelCard], video_card_of: Callable[[str], VideoCard]
) -> Weigh:
    """Gives a job's weight: rows of a picture's forwards, or operations of a video's.

    A picture's size that the model will choose counts as a square, its text as an assumed length.
    """

    def weight(job: Job) -> int:
        if isinstance(job, VideoJob):
            card = video_card_of(job.model)
            film = video_work(job, card)
            forward = card.forward.flops(film.grid) or math.prod(film.grid)
            return max(1, forward * film.levels * job.branch_count // _VIDEO_UNIT)
        work = picture_work(job, card_of(job.model))
        written = min(_ASSUMED_TEXT, job.text.max_new_tokens) if job.writes_text else 0
        return work.denoise + work.read + written * _ROWS_OF_A_TOKEN

    return weight


def _pieces(jobs: Sequence[Job], weights: Mapping[int, int], count: int) -> list[list[int]]:
    """The numbers of the weighed jobs in groups that share work, of one set of source pictures or
    one prompt; a group of more than a shard's
    part is cut in pieces of about one weight, jobs that write the same text together.
    """
    groups: dict[Hashable, list[int]] = {}
    for number in weights:
        job = jobs[number]
        groups.setdefault((job.model, job.images or job.prompt), []).append(number)
    mean = sum(weights.values()) / count
    found: list[list[int]] = []
    for members in groups.values():
        whole, before = sum(weights[number] for number in members), 0
        if whole <= mean or len(members) == 1:
            found.append(members)
            continue
        pieces: dict[int, list[int]] = {}
        for number in side_by_side(members, lambda number: _text(jobs[number])):
            pieces.setdefault(before * math.ceil(whole / mean) // whole, []).append(number)
            before += weights[number]
        found += pieces.values()
    return found


def _text(job: Job) -> Hashable:
    return text_of(job) if isinstance(job, ImageJob) else job.prompt


def _hash(name: str) -> int:
    """The same everywhere, which Python's own is not."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
