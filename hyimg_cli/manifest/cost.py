"""Cost of pictures in tokens, denoise steps and bytes, with and without sharing. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.step_cache import count_full


class JobTokens(NamedTuple):
    """Token rows of one job.

    `ar_prefill`: the prompt of the AR stage, 0 where it has none. `assumed_think`: the text it is
    taken to write. `positive`, `negative`: the prefix of each branch before its own image rows
    (`negative` is 0 without guidance branch). `ar_shared`, `positive_shared`: leading rows of them
    that earlier jobs left. `shared_prefix`: those of the negative branch that are there when it
    starts, from the positive one or an earlier job. `step_rows`: rows of one branch in one denoise
    step. `texts`: 1 where the job writes one; `shared_texts`: 1 where it takes an earlier job's,
    which is part of what it is fed then, and `spared_think` what it need not write. `steps`:
    denoise steps, where they are not as many as the job says; `forwards`: of branches in all of
    them, where not every step has every branch. `kv_rows`: of keys and values of all branches
    while they draw, where one lies in another's memory. `prompt_encodes`: texts that are encoded
    before anything is drawn, like `image_encodes`; `kept_encodes`: those of both that are on disk.
    """

    ar_prefill: int = 0
    shared_prefix: int = 0
    positive: int = 0
    negative: int = 0
    step_rows: int = 0
    branches: int = 1
    image_encodes: int = 0
    assumed_think: int = 0
    ar_shared: int = 0
    positive_shared: int = 0
    texts: int = 0
    shared_texts: int = 0
    spared_think: int = 0
    steps: int | None = None
    forwards: int | None = None
    kv_rows: int | None = None
    prompt_encodes: int = 0
    kept_encodes: int = 0


@dataclass(frozen=True)
class Cost:
    """Sums over jobs. `kv_bytes_peak` is the largest of any one job, all branches together.

    Of the `denoise_steps` a step cache leaves `full_steps` to the model, which `forwards` counts
    for each branch.

    `ar_prefill_rows` are computed, `ar_shared_rows` were there from earlier jobs. `texts` are
    written, in `think_rows`; `shared_texts` are not, for they are earlier jobs', which spares
    `spared_think_rows`. `prefix_rows`
    enter the transformer once per job with reuse of what the AR stage and the other
    branch have; `prefix_rows_unshared` is the same without any reuse.
    """

    jobs: int = 0
    denoise_steps: int = 0
    full_steps: int = 0
    image_encodes: int = 0
    ar_prefill_rows: int = 0
    ar_shared_rows: int = 0
    texts: int = 0
    shared_texts: int = 0
    think_rows: int = 0
    spared_think_rows: int = 0
    prefix_rows: int = 0
    prefix_rows_unshared: int = 0
    denoise_rows: int = 0
    forwards: int = 0
    prompt_encodes: int = 0
    kept_encodes: int = 0
    kv_bytes_peak: int = 0


# What is counted in both.
_OF_BOTH = ("image_encodes", "prompt_encodes", "kept_encodes", "texts", "shared_texts")


def job_cost(job: ImageJob, tokens: JobTokens, kv_bytes_per_token: int, first: int = 0) -> Cost:
    """The cost of one job of so many rows, from denoise step `first` on."""
    unshared = tokens.positive + tokens.negative
    # The positive branch begins with what the AR stage read and wrote; the negative one begins like
    # the positive one.
    from_ar = min(tokens.positive, tokens.ar_prefill + tokens.assumed_think)
    from_ar = from_ar or tokens.positive_shared
    from_positive = min(tokens.negative, tokens.shared_prefix)
    steps = job.num_inference_steps if tokens.steps is None else tokens.steps
    full = count_full(job.step_cache, steps, first)
    forwards = full * tokens.branches if tokens.forwards is None else tokens.forwards
    kv_rows = tokens.kv_rows or unshared + tokens.branches * tokens.step_rows
    return Cost(
        jobs=1,
        denoise_steps=steps - first,
        full_steps=full,
        ar_prefill_rows=tokens.ar_prefill - tokens.ar_shared,
        ar_shared_rows=tokens.ar_shared,
        think_rows=tokens.assumed_think,
        spared_think_rows=tokens.spared_think,
        prefix_rows=unshared - from_ar - from_positive,
        prefix_rows_unshared=unshared,
        denoise_rows=forwards * tokens.step_rows,
        forwards=forwards,
        kv_bytes_peak=kv_rows * kv_bytes_per_token,
        **{name: getattr(tokens, name) for name in _OF_BOTH},
    )


def total_cost(costs: Iterable[Cost]) -> Cost:
    """The cost of all; nothing costs nothing."""
    every = list(costs)
    sums = {field.name: sum(getattr(one, field.name) for one in every) for field in fields(Cost)}
    return Cost(**sums | {"kv_bytes_peak": max((one.kv_bytes_peak for one in every), default=0)})
