"""A picture's model over several ranks, which live as long as it does and fail a job, not a run."""

from collections.abc import Callable
from weakref import finalize

import torch

from hyimg_cli.errors import MachineError, RankError
from hyimg_cli.models import registry
from hyimg_cli.models.protocols import MixedModel
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.pipelines import gpu_lock
from hyimg_cli.spec.events import ParallelReport
from hyimg_cli.spec.run import ModelChoice


class ImageRanks:
    """The ranks over which one model's layers are split. They end with `stop`, at the latest when
    this object is let go or the process ends.
    """

    def __init__(self, choice: ModelChoice, ranks: int, lost: Callable[[], None]) -> None:
        """The processes start at once, beside what comes before `load`.

        `lost`: called when ranks end; keys and values from before are of no use then. Raises
        MachineError where there are fewer GPUs than ranks.
        """
        self._pool = RankPool(ranks, device=choice.kind(has_gpu=torch.cuda.is_available()))
        self._pool.stopped.append(lost)
        self.stop = finalize(self, gpu_lock.end, self._pool)
        gpu_lock.enter(self._pool)
        self._pool.launch()

    @property
    def member_pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..; empty where none runs."""
        return self._pool.member_pids

    def load(self, choice: ModelChoice, *, is_batch_invariant: bool) -> MixedModel:
        """The model of `choice`, each rank reading its own share of the layers.

        Raises what loading raises on any rank, MachineError where one does not come up, or dies.
        """
        gpu_lock.take(self._pool)
        try:
            return registry.load(choice, is_batch_invariant=is_batch_invariant, pool=self._pool)
        except RankError as error:
            raise MachineError(
                f"the ranks did not load the model: {error.what}",
                hint="each needs memory for its share, hyimg plan says how much; --quantization "
                "fp8 or nf4 and a larger --tensor-parallel-size make it smaller",
                code="machine.ranks",
            ) from error

    def revive(self) -> None:
        """Ranks that have ended since the last job, or left for another pool's, start again.

        Raises MachineError where one does not come up.
        """
        gpu_lock.take(self._pool)
        self._pool.revive()

    def report(self) -> ParallelReport:
        """How every picture is spread."""
        return ParallelReport(branch_ranks=1, decode=None, tensor_ranks=self._pool.size)
