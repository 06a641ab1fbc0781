"""Several jobs' prompts in one forward: how many forwards, and the same counts as one by one."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from engine.conftest import studio_of

from hyimg_cli.kv.tree import KVTree
from hyimg_cli.measure.bench.runs import _Wrapped
from hyimg_cli.memory.footprint import Together
from hyimg_cli.models.protocols import Prefill
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.spec.job import ImageJob, SizeRequest

COUNT = 6


@dataclass(eq=False)
class Watched(_Wrapped):
    """A model that records how many rows each prefill of a forward has."""

    forwards: list[list[int]] = field(default_factory=list)

    def prefill(self, prefills: Any) -> Any:
        self.forwards.append([one.rows for one in prefills])
        return self._inner.prefill(prefills)


def _run(
    jobs: list[ImageJob], model: Any, size: int, **tree: Any
) -> tuple[dict[str, ImageRequest | Lost], list[list[int]]]:
    watched = Watched(model)
    studio = studio_of(watched, tree=KVTree(10**9, **tree))
    known = WholeBatches(map(Ticket, jobs), studio, lambda since: PhaseClock(since, lambda: None))
    run = ContinuousBatch(known, Together(size, size))
    ends = [event for event in run.run() if isinstance(event, ImageRequest | Lost)]
    return {end.job.custom_id: end for end in ends}, watched.forwards


def _jobs(job: ImageJob, **facts: Any) -> list[ImageJob]:
    """Jobs that each differ in what `facts` lists, and in their seeds."""
    plain = replace(job, bot_task="none", size=SizeRequest(64, 64), num_inference_steps=1)
    return [
        replace(plain, custom_id=f"j{n}", seed=n, **{name: of(n) for name, of in facts.items()})
        for n in range(COUNT)
    ]


DISTINCT = {"prompt": lambda n: f"{n} red circles"}
SOURCES = {"prompt": lambda n: f"paint {n}", "images": None}


@pytest.mark.parametrize(
    ("facts", "splits_text", "expected"),
    [
        # All positive prompts, then a negative one, then what the other negative ones lack.
        pytest.param(DISTINCT, False, 3, id="distinct"),
        # A prompt that others share is computed first, once.
        pytest.param({"prompt": lambda n: f"{n % 2} cats"}, False, 3, id="two prompts"),
        pytest.param({"prompt": lambda _: "a cat"}, False, 3, id="one prompt"),
        # Of every source one job goes first.
        pytest.param(SOURCES, False, 4, id="edits"),
        # Every prompt begins alike, so one job goes first.
        pytest.param(DISTINCT, True, 4, id="split"),
        pytest.param({**DISTINCT, "guidance_scale": lambda _: 1.0}, False, 1, id="no guidance"),
        # The context's prompts together; each branch starts from its own context.
        pytest.param({**DISTINCT, "size": lambda _: SizeRequest()}, False, 4, id="ratio"),
    ],
)
def test_prompts_of_a_batch_share_forwards(
    family: Any,
    job: ImageJob,
    sources: tuple[str, ...],
    facts: dict[str, Any],
    splits_text: bool,
    expected: int,
) -> None:
    facts = {name: of or (lambda n: sources[n % 2 :][:1]) for name, of in facts.items()}
    jobs = _jobs(job, **facts)
    one_by_one, many = _run(jobs, family, 1, splits_text=splits_text)
    together, few = _run(jobs, family, COUNT, splits_text=splits_text)
    assert len(few) <= expected < len(many)
    assert sorted(rows for forward in few for rows in forward) == sorted(
        rows for forward in many for rows in forward
    )
    for name, alone in one_by_one.items():
        end = together[name]
        assert isinstance(alone, ImageRequest)
        assert isinstance(end, ImageRequest)
        assert (end.pixels == alone.pixels).all() or splits_text
        assert end.reuse == alone.reuse
        assert not end.warnings


def test_a_forward_has_at_most_the_rows_of_a_denoise_step(family: Any, job: ImageJob) -> None:
    jobs = _jobs(job, prompt=lambda n: f"{n} " + "red circles " * 9)
    step = studio_of(family).step_rows(jobs[0])
    _, forwards = _run(jobs, family, 2)
    assert max(map(sum, forwards)) <= 2 * step
    assert any(len(forward) == 2 for forward in forwards)


def test_a_job_at_fault_leaves_the_others_of_its_forward_alone(family: Any, job: ImageJob) -> None:
    jobs = _jobs(job, **DISTINCT, size=lambda _: SizeRequest())
    jobs[2] = replace(jobs[2], prompt="circle " * family.card.max_positions)
    ends, forwards = _run(jobs, family, COUNT)
    assert isinstance(ends["j2"], Lost)
    assert not any(end.warnings for end in ends.values())
    assert len(ends) == COUNT
    assert len(forwards) <= 6


def test_an_error_of_a_forward_is_found_by_halves(family: Any, job: ImageJob) -> None:
    jobs = _jobs(job, **DISTINCT)

    class Faulty(Watched):
        def prefill(self, prefills: Any) -> Any:
            if any(self.is_faulty(one) for one in prefills):
                raise RuntimeError("a kernel failed")
            return super().prefill(prefills)

        def is_faulty(self, prefill: Prefill) -> bool:
            return self._inner.prompter.vocabulary.decode(prefill.ids).count("3 red circles") > 0

    ends, _ = _run(jobs, Faulty(family), COUNT)
    assert [name for name, end in ends.items() if isinstance(end, Lost)] == ["j3"]
    assert "continued in halves" in " ".join(ends["j4"].warnings)
