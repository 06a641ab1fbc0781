"""A lossy step cache: which denoise steps evaluate the model, the others being estimated."""

from collections.abc import Sequence
from dataclasses import dataclass

# A job of fewer steps has nothing to leave out: a plain run of as few passes is nearer.
FEWEST_STEPS = 12


@dataclass(frozen=True, slots=True)
class StepCache:
    """Each branch's velocity is estimated between full steps, every `interval`-th, by differences
    up to `order`. The `first` steps and the last `tail` ones are full. It changes pixels.
    """

    interval: int = 3
    order: int = 1
    first: int = 3
    tail: int = 1

    @property
    def kind(self) -> str:
        return "taylor"

    def __str__(self) -> str:
        numbers = ",".join(f"{name}={getattr(self, name)}" for name in self.__slots__)
        return f"{self.kind}:{numbers}"

    def full_steps(self, networks: Sequence[object]) -> tuple[bool, ...]:
        """For each step, whether it is full. `networks`: what evaluates it; velocities before a
        change tell nothing of those behind it, so that step is full.

        Source: TaylorCache of HunyuanImage-3.0, whose first and last full steps shift the grid too.
        """
        found: list[bool] = []
        for index, network in enumerate(networks):
            is_due = index < max(self.first, 1) or index >= len(networks) - self.tail
            is_full = is_due or network != networks[index - 1]
            found.append(is_full or not any(found[1 - self.interval :]))
        return tuple(found)

    def copies(self, branches: int) -> int:
        """Tensors of the size of a job's latents that are kept between steps."""
        return (self.order + 1) * branches


def count_full(rule: StepCache | None, steps: int, first: int = 0) -> int:
    """The steps that evaluate a model, of so many of one network, from `first` on."""
    return steps - first if rule is None else sum(rule.full_steps((None,) * steps)[first:])
