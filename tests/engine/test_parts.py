"""A job of several drawings: whoever waits for it is told of one job, with one end."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hyimg_cli.errors import JobError
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.parts import tickets_of
from hyimg_cli.pipelines.queue import Dropped, Ticket
from hyimg_cli.pipelines.request import Request
from hyimg_cli.spec.events import JobStarted, Progress
from hyimg_cli.spec.job import ImageJob

CROPS = ((0, 0, 9, 9), (20, 20, 29, 29))


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def tickets(job: ImageJob, told: list[Any]) -> list[Ticket]:
    return tickets_of(replace(job, crops=CROPS), told.append, scope="s")


def done(ticket: Ticket, steps: int = 4, **said: Any) -> Request[Any]:
    clock = PhaseClock(0.0, lambda: None)
    clock.dealt_s["denoise_rest"] = 0.5
    return Request[Any](ticket.job, clock, denoise_steps=steps, **said)


def lost(ticket: Ticket) -> Request[Any]:
    return done(ticket).as_lost(JobError("told to"))


def test_a_job_of_one_drawing_has_one_ticket(job: ImageJob, told: list[Any]) -> None:
    (ticket,) = tickets_of(replace(job, crops=CROPS[:1]), told.append)
    assert ticket.job.part == 0
    ticket.tell(event := JobStarted(job.custom_id))
    assert told == [event]


def test_the_events_of_the_parts_are_those_of_the_job(
    job: ImageJob, tickets: list[Ticket], told: list[Any]
) -> None:
    first, second = tickets
    assert [(one.job.part, one.job.crops, one.scope) for one in tickets] == [
        (1, CROPS[:1], "s"), (2, CROPS[1:], "s"),
    ]  # fmt: skip
    for ticket in tickets:
        ticket.tell(JobStarted(job.custom_id))
        ticket.tell(Progress(job.custom_id, "denoise", 4, 4))
    second.tell(done(second, 3, warnings=["both"], notes=["second"]))
    first.tell(done(first, warnings=["both", "first"]))
    *events, end = told
    steps = [Progress(job.custom_id, "denoise", count, 8) for count in (4, 8)]
    assert events == [JobStarted(job.custom_id), *steps]
    assert (end.job.crops, end.denoise_steps) == (CROPS, 7)
    assert [end.job.part, *(part.job.part for part in end.parts)] == [0, 2]
    assert (end.warnings, end.notes) == (["both", "first"], ["second"])
    assert end.clock.share_s()["total"] == 1.0


@pytest.mark.parametrize("make", [lost, lambda ticket: Dropped(ticket.job.custom_id)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_part_that_is_lost_or_dropped_is_the_only_end(
    tickets: list[Ticket], told: list[Any], make: Callable[[Ticket], Any], order: tuple[int, int]
) -> None:
    ends = [make(tickets[0]), done(tickets[1])]
    for n in order:
        assert not told
        tickets[n].tell(ends[n])
    assert told == [ends[0]]
    if isinstance(told[0], Request):
        assert told[0].job.crops == CROPS
