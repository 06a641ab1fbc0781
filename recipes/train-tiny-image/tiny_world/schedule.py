"""The learning rate over a run that is limited by time, not by steps."""

import math


def cosine_rate(step: int, progress: float, *, warm_up_steps: int, floor: float = 0.02) -> float:
    """Return a factor on the peak rate: linear warm-up in steps, then a cosine in `progress`.

    `progress` is 0 to 1.
    """
    warm = min(1.0, (step + 1) / warm_up_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return warm * (floor + (1 - floor) * cosine)
