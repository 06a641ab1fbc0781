"""Cost of pictures: the tokens of one job, and what a plan counts of many. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.work import count_all


class JobTokens(NamedTuple):
    """Token rows of one job.

    `ar_prefill`: the prompt of the AR stage; 0 if it has none. `assumed_think`: the length assumed
    for the text that it writes. `positive`: the prefix of the branch with the prompt before its own
    image rows. `step_rows`: rows of one branch in one denoise step. `steps`: denoise steps, if not
    the job's own number. `forwards`: of branches in all steps, if not every step has every branch.
    `kv_rows`: rows of the prefixes of all branches, those that they share once.
    """

    ar_prefill: int = 0
    positive: int = 0
    step_rows: int = 0
    branches: int = 1
    assumed_think: int = 0
    steps: int | None = None
    forwards: int | None = None
    kv_rows: int | None = None


@dataclass(frozen=True)
class Cost:
    """Sums over pictures.

    With a step cache, the model evaluates `full_steps` of the `denoise_steps`; `forwards` counts
    each guidance branch. `prompt_encodes` and `image_encodes` are encoded before jobs are drawn,
    unless they are among the `kept_encodes` on disk. `texts` are written, in about `think_rows`
    tokens; `shared_texts` come from earlier jobs. Of jobs that ask for a text: the tokens of their
    prompts, those that earlier ones have computed, and how many are `chosen` without writing.
    """

    jobs: int = 0
    denoise_steps: int = 0
    full_steps: int = 0
    forwards: int = 0
    prompt_encodes: int = 0
    image_encodes: int = 0
    kept_encodes: int = 0
    texts: int = 0
    shared_texts: int = 0
    think_rows: int = 0
    prompt_rows: int = 0
    shared_rows: int = 0
    chosen: int = 0


def step_cost(job: ImageJob, tokens: JobTokens, first: int = 0) -> Cost:
    """Return one job's steps, from denoise step `first` on."""
    steps = job.taken_steps if tokens.steps is None else tokens.steps
    full, drawings = count_all(job, steps, first), len(job.parts)
    each = None if tokens.forwards is None else drawings * tokens.forwards
    forwards = full * tokens.branches if each is None else each
    steps = drawings * steps - first
    return Cost(jobs=1, denoise_steps=steps, full_steps=full, forwards=forwards)


def total_cost(costs: Iterable[Cost]) -> Cost:
    """Return the cost of all jobs; zero for no jobs."""
    every, names = list(costs), [field.name for field in fields(Cost)]
    return Cost(**{name: sum(getattr(one, name) for one in every) for name in names})
