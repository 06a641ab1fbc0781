"""A job's guidance branches in this process, and the step-by-step business with any runner."""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns
from collections.abc import Callable, Sequence

from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.models.latent_video import Branch, BranchInputs, BranchRunner


class LocalBranches:
    """The `BranchRunner` of one process: one branch after another."""

    def __init__(self, branch: Callable[[BranchInputs], Branch]) -> None:
        self._branch = branch
        self._branches: list[Branch] = []

    def begin(self, inputs: Sequence[BranchInputs]) -> None:
        self._branches = [self._branch(own) for own in inputs]

    def velocity(self, step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> list[Tensor]:
        return [branch(step, latents_BCFYX, timestep_B) for branch in self._branches]


class RunningBranches:
    """One job's branches at a runner, begun with the first step that is asked for. At a step that
    the job's step cache estimates the runner is not asked.

    A step out of turn, behind a failure or a restored state, begins them anew: the library's step
    caches belong to what went before.
    """

    def __init__(
        self, runner: BranchRunner, inputs: Sequence[BranchInputs], velocities: VelocityCache
    ) -> None:
        self.velocities = velocities
        self._runner = runner
        self._inputs = inputs
        # The full step in turn; none before they are begun.
        self._next: int | None = None

    def at(self, step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> Sequence[Tensor]:
        """Every branch's velocity at a step."""
        if not self.velocities.steps[step]:
            return self.velocities.estimate(step)
        if step != self._next:
            self._runner.begin(self._inputs)
        self._next = None
        found = self._runner.velocity(step, latents_BCFYX, timestep_B)
        self._next = next(iter(self.velocities.full_from(step + 1)), None)
        self.velocities.keep(step, found)
        return found
