"""Velocities of one drawing under a lossy step cache: kept at full steps, else estimated.

The index of a step decides whether it is full, so nothing is read on the host. The state belongs to
one attempt at one job.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hyimg_cli.spec.events import StepCacheReport
from hyimg_cli.spec.step_cache import StepCache

_KEPT, _COUNTS = "velocities.", "velocities.counts"


class VelocityCache:
    """The latest velocities of a drawing, backward differences, and step counts.

    Without a rule every step is full, and nothing is kept.
    """

    def __init__(self, rule: StepCache | None, networks: Sequence[object]) -> None:
        """`networks`: what evaluates each step; see `StepCache.full_steps`."""
        self.rule, self._networks = rule, networks
        self.steps = (True,) * len(networks) if rule is None else rule.full_steps(networks)
        self._last_estimated = max((i for i, full in enumerate(self.steps) if not full), default=-1)
        self.full = self.estimated = 0
        self._at = -1
        # By order, [number of tensors, ..]; the velocities themselves are in their own dtype.
        self._differences: list[Tensor] = []

    def full_from(self, index: int) -> tuple[int, ...]:
        """Return the full steps from `index` on."""
        return tuple(step for step in range(index, len(self.steps)) if self.steps[step])

    def keep(self, index: int, velocities: Sequence[Tensor]) -> None:
        """Store the velocities of a full step.

        Warm-up steps but the last are only counted: a slope over one step, stretched over many,
        does harm. So all gaps are of the interval. A change of network starts over.
        """
        if self.rule is not None and index >= self.rule.first - 1:
            is_same = self._at >= 0 and self._networks[index] == self._networks[self._at]
            former = self._differences[: self.rule.order] if is_same else []
            differences: list[Tensor] = []
            if index <= self._last_estimated:
                differences.append(torch.stack(list(velocities)).detach())
                for older in former:
                    differences.append(differences[-1].float() - older.float())
            # If there was no memory for them, nothing has changed.
            self._differences, self._at = differences, index
        self.full += 1

    def estimate(self, index: int) -> tuple[Tensor, ...]:
        """Return the estimated velocities of a skipped step, in the latest full step's dtype.

        Newton's backward form: exact for polynomials of the cache's order. Sums in float32.
        """
        assert self.rule is not None, "without a rule every step is full"
        assert self._differences, "a full step comes before the first estimate"
        gaps, factor = (index - self._at) / self.rule.interval, 1.0
        velocity, *differences = self._differences
        found = velocity.float()
        for order, difference in enumerate(differences):
            factor *= (gaps + order) / (order + 1)
            found = found + factor * difference
        estimate = found.to(velocity.dtype).unbind()
        self.estimated += 1
        return estimate

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint; nothing without a rule."""
        if self.rule is None:
            return {}
        counts = torch.tensor([self.full, self.estimated, self._at], dtype=torch.int32)
        return {_COUNTS: counts} | {f"{_KEPT}{n}": one for n, one in enumerate(self._differences)}

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore what `state` returned. Raises KeyError if it is missing."""
        if self.rule is None:
            return
        self.full, self.estimated, self._at = state[_COUNTS].tolist()
        count = sum(name.startswith(_KEPT) for name in state) - 1
        self._differences = [state[f"{_KEPT}{n}"].to(device) for n in range(count)]

    def report(self) -> StepCacheReport | None:
        """Return the rule and the counts; None without a rule."""
        if self.rule is None:
            return None
        rule, counts = self.rule, (self.full, self.estimated)
        return StepCacheReport(rule.kind, rule.interval, rule.order, rule.first, rule.tail, *counts)
