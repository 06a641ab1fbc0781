"""A lossy step cache: which denoise steps evaluate the model; the others are estimated."""

from collections.abc import Sequence
from dataclasses import dataclass

# A shorter job has no steps to leave out: a plain run of as few passes is closer.
FEWEST_STEPS = 12


@dataclass(frozen=True, slots=True)
class StepCache:
    """The rule of a step cache, which changes pixels.

    Every `interval`-th step is full. Each branch's velocity between full steps is estimated by
    differences up to `order`. The `first` steps and the last `tail` ones are full.
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
        """Return for each step whether it is full.

        `networks`: the network that evaluates each step. Velocities before a change of network say
        nothing about later ones, so that step is full. Source: TaylorCache of HunyuanImage-3.0,
        whose first and last full steps shift the grid too.
        """
        found: list[bool] = []
        for index, network in enumerate(networks):
            is_due = index < max(self.first, 1) or index >= len(networks) - self.tail
            is_full = is_due or network != networks[index - 1]
            found.append(is_full or not any(found[1 - self.interval :]))
        return tuple(found)

    def copies(self, branches: int) -> int:
        """Return the number of latent-sized tensors that are kept between steps."""
        return (self.order + 1) * branches


def count_full(rule: StepCache | None, steps: int, first: int = 0) -> int:
    """Return the number of full steps among this many steps of one network, from `first` on."""
    return steps - first if rule is None else sum(rule.full_steps((None,) * steps)[first:])
