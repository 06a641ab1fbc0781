"""Order of tickets: online first, callers in turn; each gets exactly one end."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hyimg_cli.pipelines.queue import Dropped, Ticket, TicketQueue


def ticket(name: str, caller: str = "a", *, is_online: bool = False, told: Any = None) -> Ticket:
    job: Any = SimpleNamespace(custom_id=name)
    tell = (told if told is not None else []).append
    return Ticket(job, caller, caller, is_online, tell=tell)


def names(tickets: list[Ticket]) -> str:
    return " ".join(one.job.custom_id for one in tickets)


def test_online_comes_first_and_callers_in_turn() -> None:
    queue = TicketQueue()
    queue.put([ticket("b1", "b"), ticket("b2", "b"), ticket("b3", "b"), ticket("c1", "c")])
    queue.put([ticket("o1", "x", is_online=True), ticket("o2", "x", is_online=True)])
    queue.put([ticket("p1", "y", is_online=True)])
    assert queue.counts() == {"online": 3, "batch": 4}
    assert names(queue.take(2, wait=True)) == "o1 p1"
    assert names(queue.take(9, wait=False, is_online=True)) == "o2"
    assert queue.take(9, wait=False, is_online=True) == []
    assert names(queue.take(1, wait=True)) == "b1"
    # The turn stays where it was, whenever it is asked again.
    queue.put([ticket("d1", "d")])
    assert names(queue.take(0, wait=True)) == ""
    assert names(queue.take(9, wait=True)) == "c1 b2 d1 b3"
    assert queue.counts() == {"online": 0, "batch": 0}


def test_what_is_dropped_while_it_waits_is_told_at_once() -> None:
    queue, told = TicketQueue(), list[Any]()
    waiting = [ticket(f"w{n}", told=told) for n in range(4)]
    queue.put(waiting)
    (at_work,) = queue.take(1, wait=True)
    queue.drop([at_work, waiting[2]])
    assert told == [Dropped("w2")]
    assert at_work.is_dropped
    assert names(queue.take(9, wait=False)) == "w1 w3"


def test_a_closed_queue_drops_what_waits_and_what_comes() -> None:
    queue, told = TicketQueue(), list[Any]()
    queue.put([ticket("waits", told=told)])
    queue.close()
    queue.put([ticket("comes", told=told)])
    assert told == [Dropped("waits"), Dropped("comes")]
    assert queue.is_closed
    assert queue.take(1, wait=True) == []


@pytest.mark.parametrize("wakes", ["put", "close"])
def test_whoever_waits_is_woken(wakes: str) -> None:
    queue, taken = TicketQueue(), list[list[Ticket]]()
    waiter = threading.Thread(target=lambda: taken.append(queue.take(1, wait=True)))
    waiter.start()
    one = ticket("one")
    queue.put([one]) if wakes == "put" else queue.close()
    waiter.join(10)
    assert taken == [[one] if wakes == "put" else []]


def test_nobody_waits_for_more_tickets_of_a_whole_queue() -> None:
    queue = TicketQueue(map(ticket, "abc"), is_whole=True)
    assert names(queue.take(wait=True)) == "a b c"
    assert queue.take(wait=True) == []
