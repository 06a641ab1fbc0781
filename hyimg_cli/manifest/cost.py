"""Cost of pictures in tokens, denoise steps and bytes, with and without sharing. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.step_cache import count_full


class JobTokens(NamedTuple):
    """Token rows of one job.

    `ar_prefill`: the prompt of the AR stage; 0 if it has none. `assumed_think`: the length assumed
    for the text that it writes. `positive`, `negative`: the prefix of each branch before its own
    image rows (`negative` is 0 without a guidance branch). `ar_shared`, `positive_shared`: leading
    rows of these that earlier jobs have computed. `shared_prefix`: rows of the negative branch that
    already exist when it starts, from the positive one or an earlier job. `step_rows`: rows of one
    branch in one denoise step. `texts`: 1 if the job writes a text. `shared_texts`: 1 if it uses an
    earlier job's text, which is then part of its input; `spared_think`: tokens that it need not
    write. `steps`: denoise steps, if not the job's own number. `forwards`: of branches in all
    steps, if not every step has every branch. `kv_rows`: rows of keys and values of all branches
    while they draw, if branches share memory. `prompt_encodes`, `image_encodes`: inputs encoded
    before drawing starts. `kept_encodes`: how many of these are on disk.
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
    """Sums over jobs. `kv_bytes_peak` is the largest of any one job, over all its branches.

    With a step cache, the model evaluates `full_steps` of the `denoise_steps`; `forwards` counts
    each branch.

    `ar_prefill_rows` are computed; `ar_shared_rows` come from earlier jobs. `texts` are written, in
    `think_rows`; `shared_texts` come from earlier jobs, which saves `spared_think_rows`.
    `prefix_rows` enter the transformer once per job if the K/V of the AR stage and of the other
    branch are reused; `prefix_rows_unshared` is the same count without any reuse.
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
    """Return the cost of one job with these rows, from denoise step `first` on."""
    unshared = tokens.positive + tokens.negative
    # The positive branch begins with the AR stage's input and output; the negative one begins like
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
    """Return the cost of all jobs; zero for no jobs."""
    every = list(costs)
    sums = {field.name: sum(getattr(one, field.name) for one in every) for field in fields(Cost)}
    return Cost(**sums | {"kv_bytes_peak": max((one.kv_bytes_peak for one in every), default=0)})
