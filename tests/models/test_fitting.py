"""Weights that do not fit: the message names the flag that would help."""

from typing import Any

import pytest

from hyimg_cli.memory.fitting import Attempt, flags_that_fit

SIZES = {"none": 168 * 10**9, "fp8": 91 * 10**9, "nf4": 57 * 10**9}


def attempt(free_gb: int, **changes: Any) -> Attempt:
    facts: dict[str, Any] = {
        "quantization": "none",
        "dtype": "bfloat16",
        "nbytes": SIZES.__getitem__,
        "free": free_gb * 10**9,
        "gpus": 1,
        "is_spread": False,
    }
    return Attempt(**(facts | changes))


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        (attempt(140), "--quantization fp8 takes 91.0 GB, which fits; with more GPUs"),
        (attempt(79), "--quantization nf4 takes 57.0 GB, which fits; with more GPUs"),
        (attempt(79, quantization="fp8"), "--quantization nf4 takes 57.0 GB, which fits"),
        (attempt(39), "even --quantization nf4 takes 57.0 GB; with more GPUs"),
        (attempt(39, gpus=4), "--tensor-parallel-size 4 or --device balanced spreads them over"),
        (attempt(39, gpus=4, quantization="nf4"), "--tensor-parallel-size 4"),
        (attempt(39, gpus=4, is_spread=True), "more GPUs hold less each"),
        (attempt(39, gpus=0, dtype="float32"), "--dtype bfloat16 halves the weights"),
        (attempt(39, gpus=0, quantization="nf4"), "use a machine with more"),
    ],
)
def test_the_flag_that_changes_least_is_named(tried: Attempt, said: str) -> None:
    assert said in flags_that_fit(tried)
    assert "fp8" not in flags_that_fit(attempt(200, quantization="fp8"))
