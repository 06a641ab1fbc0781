"""The ranks that work with one loaded model, for pictures or videos.

Pools of ranks take turns, because a process is in one group of ranks at a time. A pool that loses
its turn has lost everything its ranks held, and its next turn restarts them.

    pictures    layers of the network, and guidance branches
    videos      rank 0   the model itself: prompts, noise, scheduler, merging, files
                rank r   its own VAE (tiles), its own transformer (a branch or tokens), from the
                         same checkpoint

One pool serves a model and lives as long as the model. A rank that dies fails a job, not the run.
Videos have the same pixels as with one process or, if tokens are shared, equal up to rounding.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from hyimg_cli.errors import MachineError, RankError
from hyimg_cli.models import registry
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.latent_video import LatentVideoModel, SpreadModel, is_cut_by
from hyimg_cli.parallel.branches import TRANSFORMER, ParallelBranches
from hyimg_cli.parallel.ranks import DeviceKind, Rank, RankPool
from hyimg_cli.settings.run import ModelChoice, ParallelConfig
from hyimg_cli.spec.card import TileRule
from hyimg_cli.spec.events import ParallelReport
from hyimg_cli.tiling.decode import PatchParallelDecoder, TiledVae

VAE = "vae"
_POOLS: WeakSet[RankPool] = WeakSet()


def take(pool: RankPool) -> None:
    """Give the turn to this pool, and stop all others."""
    for other in list(_POOLS):
        if other is not pool:
            other.stop()


class ModelRanks(ABC):
    """The ranks that work with one loaded model.

    They end with `stop`, or at the latest when this object is freed or the process ends.
    """

    def __init__(self, pool: RankPool) -> None:
        """Start the processes at once, in parallel with the work before `load`."""
        self._pool = pool

        def end() -> None:
            pool.stop()
            pool.here.parts.clear()  # the parts of rank 0 itself

        self.stop = finalize(self, end)
        _POOLS.add(pool)
        pool.launch()

    def revive(self) -> None:
        """Restart ranks that have died or were stopped for another pool, each with its parts.

        Raises MachineError if one does not start.
        """
        take(self._pool)
        self._pool.revive()

    @abstractmethod
    def report(self) -> ParallelReport:
        """Return how the last job was spread over the ranks."""

    @contextmanager
    def _loading(self, remedy: str) -> Iterator[None]:
        """Hold the turn while each rank reads its own part of the model."""
        take(self._pool)
        try:
            yield
        except RankError as error:
            raise MachineError(
                f"the ranks did not load the model: {error.what}", hint=remedy, code="machine.ranks"
            ) from error


class ImageRanks(ModelRanks):
    """The ranks over which one model's layers and guidance branches are spread."""

    def __init__(
        self, choice: ModelChoice, parallel: ParallelConfig, lost: Callable[[], None]
    ) -> None:
        """`lost`: called when ranks end, because earlier keys and values become useless then.

        Raises MachineError if there are fewer GPUs than ranks.
        """
        device = choice.kind(has_gpu=torch.cuda.is_available())
        sets = parallel.cfg_ranks
        pool = RankPool(parallel.picture_ranks, device=device, branch_sets=sets)
        pool.stopped.append(lost)
        super().__init__(pool)

    def load(self, choice: ModelChoice, *, is_batch_invariant: bool) -> DecoderModel:
        """Load the model of `choice`; each rank reads its own share of the layers.

        Raises any rank's loading error, and MachineError if a rank does not start or dies.
        """
        remedy = (
            "each needs memory for its share (hyimg plan shows how much); --quantization fp8 "
            "or nf4 and a larger --tensor-parallel-size make it smaller"
        )
        with self._loading(remedy):
            return registry.load(choice, is_batch_invariant=is_batch_invariant, pool=self._pool)

    def report(self) -> ParallelReport:
        sets = self._pool.branch_sets
        return ParallelReport(sets, decode=None, tensor_ranks=self._pool.size // sets)


def load_vae(choice: ModelChoice, rank: Rank) -> TiledVae:
    """Load a checkpoint's autoencoder on a rank's GPU, without offload: it is alone there."""
    choice = replace(choice, device=str(rank.device), cpu_offload="none")
    return registry.load_video(choice).vae


def load_transformer(choice: ModelChoice, rank: Rank) -> LatentVideoModel:
    """Open a checkpoint on a rank, and load only its transformer."""
    opened = registry.load_video(replace(choice, device=str(rank.device)))
    opened.load_transformer()
    return opened


class VideoRanks(ModelRanks):
    """The ranks over which one model's guidance branches and decode are spread."""

    def __init__(
        self, model: LatentVideoModel, choice: ModelChoice, config: ParallelConfig
    ) -> None:
        """`choice` names the model.

        Raises MachineError if ranks cannot share the model's work, if there are fewer GPUs than
        ranks, or if rank 0 would not be on the first GPU.
        """
        device, ranks = model.device, config.ranks
        if device.type == "cuda" and ranks > 1 and device.index not in (None, 0):
            raise MachineError(
                f"rank 0 would be on {device}; {ranks} ranks take the GPUs 0 to {ranks - 1}",
                hint="remove --device, and choose GPUs with CUDA_VISIBLE_DEVICES",
                code="machine.ranks",
            )
        if not isinstance(model, SpreadModel):
            raise MachineError(
                f"{model.card.name} has neither tiles nor guidance branches to share",
                hint="remove --vae-patch-parallel-size, --cfg-parallel-size and "
                "--context-parallel-size; --replicas share the jobs",
                code="machine.ranks",
            )
        self._model, self._choice, self._config = model, choice, config
        self._branches: ParallelBranches | None = None
        self._tiles: PatchParallelDecoder | None = None
        kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
        super().__init__(RankPool(ranks, device=kind))

    def load(self, *, with_branches: bool = True) -> None:
        """Let each rank load its parts, all at once, and use the ranks for the model.

        Parts that are loaded already are not read again. `with_branches`: False if only the decode
        is needed. Raises any rank's loading error, and MachineError if a rank does not start or
        dies.
        """
        model, config, pool = self._model, self._config, self._pool
        with self._loading("use fewer ranks; each needs memory for what it loads"):
            if config.vae_ranks > 1 and self._tiles is None:
                part = partial(load_vae, self._choice)
                pool.load(VAE, part, ranks=config.vae_ranks, own=lambda: model.vae)
                self._tiles = tiles = PatchParallelDecoder(pool, ranks=config.vae_ranks, part=VAE)
                alone = model.decoder

                def decode(latents_BCFYX: Tensor, tiling: TileRule | None) -> Iterator[Tensor]:
                    """Decode over the ranks if the library would cut tiles; otherwise alone.

                    Alone, the bits are those of one process, and no report is made.
                    """
                    tiles.report = None
                    if tiling and is_cut_by(tiling, latents_BCFYX):
                        yield tiles.decode(latents_BCFYX, tiling)
                    else:
                        yield from alone(latents_BCFYX, tiling)

                model.decoder = decode
            if config.step_ranks > 1 and with_branches and self._branches is None:
                ranks, is_split = config.step_ranks, config.context_ranks > 1
                branches = ParallelBranches(pool, ranks=ranks, splits_tokens=is_split)
                part_of_rank = partial(load_transformer, self._choice)

                def own_transformer() -> LatentVideoModel:
                    model.load_transformer()
                    return model

                # No reference to this object: the pool knows the model and would keep both alive.
                def runner() -> ParallelBranches:
                    """Return the branches, after loading each rank's transformer if needed."""
                    if TRANSFORMER not in pool.parts:
                        pool.load(TRANSFORMER, part_of_rank, ranks=ranks, own=own_transformer)
                    return branches

                runner()
                self._branches, model.branch_runner = branches, runner
                if is_split:
                    pool.stopped.append(model.context.forget)

    def release_branches(self) -> None:
        """Free the transformers of all ranks but the first; the next branches load them again.

        The ranks are restarted: a decode has run out of memory, which has ended most of them
        already.
        """
        if TRANSFORMER in self._pool.parts:
            self._pool.unload(TRANSFORMER)

    def report(self) -> ParallelReport:
        one, tiles = self._branches, self._tiles
        is_split, ranks = one is not None and one.splits_tokens, 1 if one is None else one.ranks
        return ParallelReport(
            branch_ranks=1 if is_split else ranks,
            decode=None if tiles is None else tiles.report,
            context_ranks=ranks if is_split else 1,
        )
