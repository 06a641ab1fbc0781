"""Values that are equal to the bit on these tests' own processors, and close on others.

MKL rounds a product's row by the number of other rows. Its kernels for AVX-512 on Intel do so for
fewer shapes than its kernels for AVX2 or for other makers' processors.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch


@cache
def is_exact_here() -> bool:
    facts = Path("/proc/cpuinfo")
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "MKL_ENABLE_INSTRUCTIONS" not in os.environ
        and facts.exists()
        and "GenuineIntel" in facts.read_text()
    )


def is_same(found: Any, expected: Any) -> bool:
    """Equal to the bit; on other processors as near as rounding leaves it: a level of a picture, or
    some last bits of the largest value.
    """
    found, expected = np.asarray(found), np.asarray(expected)
    if is_exact_here() or found.shape != expected.shape:
        return np.array_equal(found, expected)
    apart = np.abs(found.astype(float) - expected.astype(float))
    if found.dtype == np.uint8:
        return bool(apart.max() <= 1 and apart.mean() < 1e-3)
    return bool(apart.max() <= 1e-5 * max(1.0, np.abs(expected).max()))
