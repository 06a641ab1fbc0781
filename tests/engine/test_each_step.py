"""Jobs that come at any time and join a drawing at any step: pixels as alone, even if others
leave or memory runs out; online jobs first; nothing shared between scopes.
"""

import gc
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import studio_of
from engine.test_group import _Buffers
from engine.test_shared_texts import run, sharing
from engine.test_short_memory import FULL, limit_slots, limited

from hyimg_cli.kv.tree import KVTree
from hyimg_cli.memory.footprint import Together, needs
from hyimg_cli.pipelines.clock import PhaseClock, Shares
from hyimg_cli.pipelines.image.admission import AtWork, Served
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages
from hyimg_cli.pipelines.queue import Dropped, Ticket, TicketQueue
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobStarted, Progress
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.step_cache import StepCache

SQUARE = SizeRequest(64, 64)


class Server:
    """Tickets of which some are put, and some dropped, in a pass; where nothing is at work, the
    next one comes at once. `ends` by ticket; `heard`: each with what it was told, in order.
    """

    def __init__(self, stages: ImageStages, together: Together, read_lag: int = 0) -> None:
        self.passes, self.shares = 0, Shares()
        self.coming: dict[int, list[Ticket]] = {}
        self.leaving: dict[int, list[Ticket]] = {}
        self.tickets: list[Ticket] = []
        self.ends: dict[Ticket, Any] = {}
        self.heard: list[tuple[Ticket, Any]] = []
        server = self

        class Driven(Served):
            def next_pass(self, at: AtWork) -> Sequence[ImageRequest]:
                server.passes += 1
                server._advance()
                return super().next_pass(at)

        class Coming(TicketQueue):
            def take(self, room: int, *, wait: bool, **kinds: bool) -> list[Ticket]:
                while wait and not self.is_closed and not any(self.counts().values()):
                    assert server.coming or server._is_over, "a ticket is lost"
                    server.passes = min(server.coming, default=server.passes)
                    server._advance()
                return super().take(room, wait=wait, **kinds)

        self.queue = Coming()

        def clock(since: float) -> PhaseClock:
            return PhaseClock(since, lambda: None, self.shares)

        self.admission = Driven(self.queue, stages, clock, BatchConfig())
        self.batch = ContinuousBatch(self.admission, together, read_lag=read_lag)

    def put(
        self, job: ImageJob, at: int = 0, *, scope: str = "a", is_online: bool = True
    ) -> Ticket:
        ticket = Ticket(job, scope, scope, is_online)
        ticket.tell = lambda event: self._hear(ticket, event)
        self.tickets.append(ticket)
        self.coming.setdefault(at, []).append(ticket)
        return ticket

    def drop(self, ticket: Ticket, at: int) -> None:
        self.leaving.setdefault(at, []).append(ticket)

    def run(self) -> dict[str, Any]:
        """Every ticket's end, by custom_id."""
        for work, event in self.batch.events():
            work.ticket.tell(event)
        assert self.ends.keys() == set(self.tickets), "each is told of its end"
        return {ticket.job.custom_id: end for ticket, end in self.ends.items()}

    @property
    def _is_over(self) -> bool:
        return len(self.ends) == len(self.tickets)

    def _advance(self) -> None:
        if self._is_over:
            self.queue.close()
        for number in [number for number in self.coming if number <= self.passes]:
            self.queue.put(self.coming.pop(number))
        for number in [number for number in self.leaving if number <= self.passes]:
            self.queue.drop(self.leaving.pop(number))

    def _hear(self, ticket: Ticket, event: Any) -> None:
        self.heard.append((ticket, event))
        if isinstance(event, ImageRequest | Lost | Dropped):
            assert ticket not in self.ends, "a ticket has one end"
            self.ends[ticket] = event


def pixels(ends: dict[str, Any]) -> dict[str, bytes]:
    return {n: end.pixels.tobytes() for n, end in ends.items() if isinstance(end, ImageRequest)}


@pytest.fixture
def mixed(job: ImageJob, sources: tuple[str, ...]) -> list[ImageJob]:
    """Forty unlike jobs: with and without texts, sources, guidance and step caches."""
    caches = [StepCache(2, 1, first=2), StepCache(3, 0), StepCache(4, 2, first=1)]
    return [
        replace(
            job,
            custom_id=f"{n}",
            seed=n,
            ar_seed=n,
            prompt="a red circle " * (n % 3 + 1),
            bot_task=("think_recaption", "none", "recaption", "none")[n % 4],
            size=SQUARE,
            images=sources[: (0, 1, 0, 2, 0)[n % 5]],
            num_inference_steps=2 + n % 7,
            guidance_scale=1.0 if n % 6 == 5 else 3.0,
            step_cache=caches[n % 3] if n % 7 > 3 else None,
            text=replace(job.text, max_new_tokens=1 + n * 5 % 11),
        )
        for n in range(40)
    ]


_alone: dict[str, bytes] = {}


@pytest.fixture
def alone(family: Any, mixed: list[ImageJob]) -> dict[str, bytes]:
    """The oracle: pixels of every job in a run of its own."""
    if not _alone:
        for one in mixed:
            _alone.update(pixels(run([one], studio_of(family), 1)))
    return dict(_alone)


@pytest.mark.parametrize(
    ("seed", "budget", "together", "read_lag"),
    [
        (1, 0, (3, 2), 0),
        pytest.param(2, 300_000, (8, 8), 1, marks=pytest.mark.thorough),
        pytest.param(3, 10**9, (1, 1), 0, marks=pytest.mark.thorough),
        pytest.param(4, 10**9, (8, 4), 0, marks=pytest.mark.thorough),
    ],
)
def test_pixels_are_those_of_a_run_alone_whenever_jobs_come_and_leave(
    family: Any,
    mixed: list[ImageJob],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    budget: int,
    together: tuple[int, int],
    read_lag: int,
) -> None:
    """A third leaves in the midst; of nobody anything is left."""
    chance, tree, buffers = random.Random(seed), KVTree[Any](budget), _Buffers(monkeypatch, family)
    server = Server(sharing(family, tree), Together(*together), read_lag)
    for one in chance.sample(mixed, len(mixed)):
        at = chance.randrange(120)
        scope, is_online = chance.choice(["a", "b", "c"]), chance.random() < 0.5
        ticket = server.put(one, at, scope=scope, is_online=is_online)
        if chance.random() < 1 / 3:
            server.drop(ticket, at + chance.randrange(25))
    ends = server.run()
    dropped = {name for name, end in ends.items() if isinstance(end, Dropped)}
    assert 1 <= len(dropped) <= 20
    assert pixels(ends) == {name: of for name, of in alone.items() if name not in dropped}
    for held in (server.ends, server.heard, ends):
        held.clear()
    gc.collect()
    assert not buffers.alive
    assert not server.shares._at_work, "a job that left takes a share of others' time"


def test_jobs_of_one_name_are_told_apart(
    family: Any, mixed: list[ImageJob], alone: dict[str, bytes]
) -> None:
    server = Server(sharing(family), Together(4, 4))
    both = [server.put(mixed[0], scope="a"), server.put(mixed[0], 3, scope="b", is_online=False)]
    server.drop(server.put(mixed[0], 1, scope="c"), 6)
    server.run()
    for ticket in both:
        assert server.ends[ticket].pixels.tobytes() == alone["0"]
        told = [event for one, event in server.heard if one is ticket]
        assert isinstance(told[0], JobStarted)
        steps = [one.done for one in told if isinstance(one, Progress) and one.phase == "denoise"]
        assert steps == [0, 1, 2]


def test_whoever_joins_takes_the_next_step_with_those_that_draw(
    family: Any, mixed: list[ImageJob], alone: dict[str, bytes]
) -> None:
    plain = [one for one in mixed if one.bot_task == "none" and not one.images]
    long, short = (
        next(one for one in plain if one.num_inference_steps == steps) for steps in (7, 3)
    )
    server = Server(studio_of(family), Together(4, 4))
    server.put(long)
    server.put(short, 3)
    ends = server.run()
    assert pixels(ends) == {one.custom_id: alone[one.custom_id] for one in (long, short)}
    order = [
        (ticket.job.custom_id, event.done)
        for ticket, event in server.heard
        if isinstance(event, Progress) and event.phase == "denoise" and event.done
    ]
    assert order.index((short.custom_id, 3)) < order.index((long.custom_id, 6))
    assert {end.batch["denoise"] for end in ends.values()} == {2}


def test_batches_slow_down_for_online_jobs_and_never_stop(
    family: Any, mixed: list[ImageJob]
) -> None:
    """Of eight passes they move in one; two places of eight are left to online jobs."""
    background = [
        replace(mixed[1], custom_id=f"b{n}", images=(), num_inference_steps=30) for n in range(9)
    ]
    server = Server(studio_of(family), Together(8, 8))
    for one in background:
        server.put(one, scope="batch", is_online=False)
    online = replace(background[0], custom_id="online", num_inference_steps=16)
    ticket = server.put(online, 5)
    server.run()
    at = next(n for n, (one, event) in enumerate(server.heard) if one is ticket)
    end = server.heard.index((ticket, server.ends[ticket]))
    moved = Counter(
        one.job.custom_id
        for one, event in server.heard[at:end]
        if isinstance(event, Progress) and event.phase == "denoise" and event.done
    )
    assert moved.pop("online") == 16
    assert moved == {f"b{n}": 2 for n in range(6)}


def test_the_next_writes_where_the_one_that_wrote_for_all_leaves(
    family: Any, job: ImageJob
) -> None:
    long = replace(job, text=replace(job.text, temperature=0.0, max_new_tokens=40))
    alike = [replace(long, custom_id=f"{n}", seed=n) for n in range(4)]
    server = Server(sharing(family, KVTree(10**9)), Together(4, 4))
    first, *others = [server.put(one) for one in alike]
    server.drop(first, 3)
    server.drop(others[1], 5)  # while it waits for the text
    ends = server.run()
    assert [type(ends[name]) for name in "02"] == [Dropped, Dropped]
    assert (ends["1"].cot_from, ends["3"].cot_from) == (None, "1")
    expected = run(alike, sharing(family), 4)
    assert pixels(ends) == {name: pixels(expected)[name] for name in "13"}


def test_scopes_share_nothing(family: Any, mixed: list[ImageJob]) -> None:
    """Rows are computed, and texts written, as if the other scope were not there."""
    writes = next(one for one in mixed if one.bot_task == "recaption" and one.images)
    server = Server(sharing(family, KVTree(10**9)), Together(4, 4))
    for n, (name, scope) in enumerate([("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")]):
        server.put(replace(writes, custom_id=name), 1000 * n, scope=scope)
    ends = server.run()
    for scope in "ab":
        first, second = ends[f"{scope}1"], ends[f"{scope}2"]
        assert (first.cot_from, second.cot_from) == (None, f"{scope}1")
        assert first.reuse == ends["a1"].reuse
        assert first.reuse.ar_shared_tokens == 0
        assert second.reuse.ar_prefill_tokens == 0
        assert second.reuse.ar_taken_tokens == first.reuse.ar_decode_tokens > 0


@pytest.mark.parametrize("read_lag", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_batches_that_do_not_fit_go_on_in_halves(
    family: Any,
    mixed: list[ImageJob],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    read_lag: int,
) -> None:
    feed = family.network.feed

    def small(items: Any) -> Any:
        if len(items) > 3:
            raise FULL
        return feed(items)

    monkeypatch.setattr(family.network, "feed", small)
    refused = limited(monkeypatch, family, 2)
    server = Server(studio_of(family), Together(8, 8), read_lag)
    for n, one in enumerate(mixed[:16]):
        server.put(one, n // 2, is_online=n % 3 > 0)
    ends = server.run()
    assert refused
    assert pixels(ends) == {one.custom_id: alone[one.custom_id] for one in mixed[:16]}
    assert "continued in halves" in str([end.warnings for end in ends.values()])


@pytest.mark.parametrize("part", [1.0, pytest.param(2.0, marks=pytest.mark.thorough)])
def test_jobs_wait_and_begin_anew_where_memory_is_short(
    family: Any,
    mixed: list[ImageJob],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    part: float,
) -> None:
    """Room for the K/V of so many jobs in all, beside what others hold. And a picture is decoded
    where nothing else holds any.
    """
    chance, others = random.Random(0), [family.new_buffer() for _ in range(60)]
    for other in others:
        other.reserve(chance.randrange(1, 60))
    limit_slots(monkeypatch, family, mixed[:12], part)
    buffers, decode = _Buffers(monkeypatch, family), family.decode_latents

    def full(latents: Any) -> Any:
        if buffers.alive:
            raise FULL
        return decode(latents)

    monkeypatch.setattr(family, "decode_latents", full)
    server = Server(studio_of(family, tree=KVTree(10**9)), Together(4, 4))
    for n, one in enumerate(mixed[:12]):
        server.put(one, n, is_online=n % 3 > 0)
    ends = server.run()
    assert pixels(ends) == {one.custom_id: alone[one.custom_id] for one in mixed[:12]}
    notes = str([end.warnings for end in ends.values()])
    assert "started again: not enough memory" in notes or part > 1
    assert "decoded after them" in notes


def test_a_fault_of_one_is_its_own(
    family: Any,
    mixed: list[ImageJob],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    velocity = family.network.velocity

    def faulty(pictures: Any) -> Any:
        if any(live.guidance == 1.0 and live.step.next_sigma == 0 for live in pictures):
            raise RuntimeError("cannot draw this one")
        return velocity(pictures)

    monkeypatch.setattr(family.network, "velocity", faulty)
    server = Server(studio_of(family), Together(8, 8))
    for n, one in enumerate(mixed[:14]):
        server.put(one, n // 3)
    ends = server.run()
    lost = {name: end for name, end in ends.items() if isinstance(end, Lost)}
    assert lost.keys() == {"5", "11"}
    assert {name: end.denoise_steps for name, end in lost.items()} == {"5": 6, "11": 5}
    expected = {one.custom_id: alone[one.custom_id] for one in mixed[:14]}
    assert pixels(ends) == {name: of for name, of in expected.items() if name not in lost}


def test_no_more_kv_is_held_than_was_counted(
    family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that draw while others think, come and are decoded: see `Needs.joins`."""
    alike = [
        replace(
            job,
            custom_id=f"{n}",
            seed=n,
            ar_seed=n,
            num_inference_steps=4,
            size=SQUARE,
            bot_task="recaption",
            text=replace(job.text, max_new_tokens=6),
        )
        for n in range(14)
    ]
    config = RunConfig(OutputConfig(Path()), model=ModelChoice(device="cpu", dtype="float32"))
    card = replace(family.card, vae_bytes_per_pixel=0)
    counted = replace(needs(alike, card, config, prefixes=0), joins=True).widest(Together(3, 3))
    buffers = _Buffers(monkeypatch, family)
    server = Server(studio_of(family), Together(3, 3))
    for n, one in enumerate(alike):
        server.put(one, n)
    assert len(pixels(server.run())) == len(alike)
    rounding = 6 * family.arena.page * family.arena.storage.row_bytes
    assert 0.8 * counted.kv <= buffers.most <= counted.kv + rounding


@pytest.mark.thorough
def test_online_jobs_that_fill_every_place_do_not_stop_a_batch(
    family: Any, mixed: list[ImageJob]
) -> None:
    """Its jobs come one after another while more online jobs wait than there are places."""
    plain = replace(mixed[1], images=(), step_cache=None, num_inference_steps=4)
    server = Server(studio_of(family), Together(2, 2))
    for n in range(60):
        server.put(replace(plain, custom_id=f"o{n}"))
    background = [
        server.put(replace(plain, custom_id=f"b{n}"), scope="b", is_online=False) for n in range(3)
    ]
    server.run()
    order = [*server.ends]
    assert [order.index(one) < 57 for one in background] == [True] * 3
    assert order[:2] != background[:2]


def test_batches_alone_take_the_forwards_of_a_run(
    family: Any, mixed: list[ImageJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows in the same number of forwards, places for online jobs or not."""
    rows: dict[str, list[int]] = {}

    def count(name: str) -> None:
        called = getattr(family.network, name)

        def counting(items: Any) -> Any:
            rows.setdefault(name, []).append(len(items))
            return called(items)

        monkeypatch.setattr(family.network, name, counting)

    count("feed")
    count("velocity")
    jobs = [replace(one, images=(), step_cache=None) for one in mixed if one.bot_task != "none"]
    run(jobs, studio_of(family), 6)
    offline, rows = rows, {}
    server = Server(studio_of(family), Together(8, 8))
    for one in jobs:
        server.put(one, scope="batch", is_online=False)
    server.run()
    assert rows == offline
    assert max(rows["velocity"]) == 6


def test_online_texts_are_written_together(family: Any, mixed: list[ImageJob]) -> None:
    """Where all places draw, rows gather until one of them is free."""
    writes = replace(mixed[2], images=(), step_cache=None, num_inference_steps=20)
    server = Server(studio_of(family), Together(4, 2))
    for n in range(2):
        server.put(replace(mixed[1], custom_id=f"d{n}", images=(), num_inference_steps=20))
    for n in range(3):
        server.put(replace(writes, custom_id=f"w{n}"), 4 + 2 * n)
    ends = server.run()
    assert [ends[f"w{n}"].batch["think"] for n in range(3)] == [3, 3, 3]
