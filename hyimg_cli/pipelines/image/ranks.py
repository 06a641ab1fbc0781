"""A picture's model over several ranks, which live as long as it does and fail a job, not a run."""

from collections.abc import Callable

import torch

from hyimg_cli.models import registry
from hyimg_cli.models.protocols import MixedModel
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.pipelines.gpu_lock import ModelRanks
from hyimg_cli.settings.run import ModelChoice, ParallelConfig
from hyimg_cli.spec.events import ParallelReport


class ImageRanks(ModelRanks):
    """The ranks over which one model's layers, and guidance branches, are spread."""

    def __init__(
        self, choice: ModelChoice, parallel: ParallelConfig, lost: Callable[[], None]
    ) -> None:
        """`lost`: called when ranks end; keys and values from before are of no use then.

        Raises MachineError where there are fewer GPUs than ranks.
        """
        device = choice.kind(has_gpu=torch.cuda.is_available())
        sets = parallel.cfg_ranks
        pool = RankPool(parallel.picture_ranks, device=device, branch_sets=sets)
        pool.stopped.append(lost)
        super().__init__(pool)

    def load(self, choice: ModelChoice, *, is_batch_invariant: bool) -> MixedModel:
        """The model of `choice`, each rank reading its own share of the layers.

        Raises what loading raises on any rank, MachineError where one does not come up, or dies.
        """
        remedy = (
            "each needs memory for its share, hyimg plan says how much; --quantization fp8 or nf4 "
            "and a larger --tensor-parallel-size make it smaller"
        )
        with self._loading(remedy):
            return registry.load(choice, is_batch_invariant=is_batch_invariant, pool=self._pool)

    def report(self) -> ParallelReport:
        sets = self._pool.branch_sets
        return ParallelReport(sets, decode=None, tensor_ranks=self._pool.size // sets)
