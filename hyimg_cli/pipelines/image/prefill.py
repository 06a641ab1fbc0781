"""Prefills of several jobs in few forwards.

A job's work between its prefills is a generator. It yields the prefills that it needs now, and
gets their last hidden states. An empty list means that it waits for a prefix that another job is
about to compute. In each round, the prefills of all jobs share forwards.

    job 1    system + image + prompt ▸ positive ▸ negative
    job 2    waits                   ▸ prompt   ▸ positive ▸ negative    (system and image shared)
    job 3    system + prompt         ▸ positive ▸ negative
    forwards 1                         2          3           4

A prefix is computed in the same pieces as for one job after another, so on a CPU bits are equal.
"""

# Legend: M model width
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any, TypeVar

from torch import Tensor

from hyimg_cli.errors import JobError
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.protocols import Prefill

Made = TypeVar("Made")
Prefilling = Generator[list[Prefill], list[Tensor], Made]


def prefill_together(
    model: DecoderModel, jobs: Sequence[Prefilling[Made]], most_rows: int
) -> Iterator[tuple[int, Made | JobError]]:
    """Run all jobs to their ends; yield each one's number as it ends, and what it has made.

    That may be the JobError that ended it; any other error ends all that are left. A forward has at
    most `most_rows` rows, unless a single prefill has more.
    """
    # What each unfinished job is waiting for; a generator starts with None.
    states: dict[int, Any] = dict.fromkeys(range(len(jobs)))
    with ExitStack() as ending:
        for job in jobs:
            ending.callback(job.close)
        while states:
            wanted: dict[int, list[Prefill]] = {}
            for number, answer in states.items():
                try:
                    wanted[number] = jobs[number].send(answer)
                except StopIteration as end:
                    yield number, end.value
                except JobError as error:
                    yield number, error
            hidden_M = _forwards(model, [*chain(*wanted.values())], most_rows)
            states = {number: [*islice(hidden_M, len(wants))] for number, wants in wanted.items()}


def _forwards(model: DecoderModel, prefills: Sequence[Prefill], most_rows: int) -> Iterator[Tensor]:
    together: list[Prefill] = []
    for prefill in prefills:
        if together and sum(one.rows for one in together) + prefill.rows > most_rows:
            yield from model.prefill(together)
            together = []
        together.append(prefill)
    if together:
        yield from model.prefill(together)
