"""A job's guidance branches in this process, and the step-by-step business with any runner."""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from hyimg_cli.models.latent_video import Branch, BranchInputs, BranchRunner, PromptEmbedding
from hyimg_cli.spec.job import VideoJob


class LocalBranches:
    """The `BranchRunner` of one process: one branch after another."""

    def __init__(self, branch: Callable[[BranchInputs], Branch]) -> None:
        self._branch = branch
        self._branches: list[Branch] = []

    def begin(self, inputs: Sequence[BranchInputs]) -> None:
        self._branches = [self._branch(own) for own in inputs]

    def velocity(self, latents_BCFYX: Tensor, timestep_B: Tensor) -> list[Tensor]:
        return [branch(latents_BCFYX, timestep_B) for branch in self._branches]


class RunningBranches:
    """One job's branches at a runner, begun with the first step that is asked for.

    A step out of turn, behind a failure or a restored state, begins them anew: branches count
    their steps, and their step caches belong to what went before.
    """

    def __init__(self, runner: BranchRunner, inputs: Sequence[BranchInputs]) -> None:
        self._runner = runner
        self._inputs = inputs
        self._next: int | None = None

    def at(self, step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> Sequence[Tensor]:
        """Every branch's velocity at a step."""
        if self._next != step:
            self._runner.begin([replace(own, first_step=step) for own in self._inputs])
        self._next = None
        velocities = self._runner.velocity(latents_BCFYX, timestep_B)
        self._next = step + 1
        return velocities


def inputs_of(
    job: VideoJob,
    texts: Sequence[str],
    embeddings: Mapping[str, PromptEmbedding],
    start: Mapping[str, Tensor],
) -> list[BranchInputs]:
    """A branch for each text: the conditional one, and under CFG that of the negative prompt."""
    return [
        BranchInputs(job, number, embeddings[text], start=start)
        for number, text in enumerate(texts)
    ]
