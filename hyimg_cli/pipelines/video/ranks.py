"""A video model at work on several ranks: tiles of its decode, branches of its guidance, or tokens
of each branch.

    rank 0   the model itself: prompts, noise, scheduler, merging, files
    rank r   its own VAE (tiles), its own transformer (a branch or tokens), from the same checkpoint

One pool of ranks serves all; it lives as long as the model. Pixels are those of one process; where
tokens are shared, within rounding.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from hyimg_cli.errors import MachineError
from hyimg_cli.models import registry
from hyimg_cli.models.latent_video import (
    LatentDecoder,
    LatentVideoModel,
    SpreadModel,
    VideoVae,
    is_cut_by,
)
from hyimg_cli.parallel.branches import ParallelBranches
from hyimg_cli.parallel.ranks import DeviceKind, Rank, RankPool
from hyimg_cli.pipelines.gpu_lock import ModelRanks
from hyimg_cli.settings.run import ModelChoice, ParallelConfig
from hyimg_cli.spec.card import TileRule
from hyimg_cli.spec.events import DecodeReport, ParallelReport
from hyimg_cli.tiling.decode import PatchParallelDecoder

VAE, TRANSFORMER = "vae", "transformer"


@dataclass(frozen=True)
class VaePart:
    """Loads the autoencoder of a checkpoint on a rank, as rank 0 loads its own."""

    choice: ModelChoice

    def __call__(self, rank: Rank) -> VideoVae:
        # It is all that the rank has, and stays on its GPU.
        return _opened(replace(self.choice, cpu_offload="none"), rank).vae


@dataclass(frozen=True)
class TransformerPart:
    """Opens a checkpoint on a rank and reads its transformer, nothing else."""

    choice: ModelChoice

    def __call__(self, rank: Rank) -> LatentVideoModel:
        return _ready(_opened(self.choice, rank))


class VideoRanks(ModelRanks):
    """The ranks over which one model's guidance branches and decode are spread."""

    def __init__(self, model: SpreadModel, choice: ModelChoice, config: ParallelConfig) -> None:
        """`choice` names the model.

        Raises MachineError where there are fewer GPUs than ranks, or rank 0 would be on another one
        than the first.
        """
        device, last = model.device, config.ranks - 1
        if device.type == "cuda" and last > 0 and device.index not in (None, 0):
            raise MachineError(
                f"rank 0 would be on {device}; {config.ranks} ranks take the GPUs 0 to {last}",
                hint="leave out --device, and choose the GPUs by CUDA_VISIBLE_DEVICES",
                code="machine.ranks",
            )
        self._model, self._choice, self._config = model, choice, config
        self._branches: ParallelBranches | None = None
        self._decoder: SpreadDecoder | None = None
        kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
        super().__init__(RankPool(config.ranks, device=kind))

    def load(self, *, with_branches: bool = True) -> None:
        """Have each rank read what it works with, all at once, and put them to work for the model;
        what they have is not read again. `with_branches`: not for the decode alone.

        Raises what loading raises on any rank, MachineError where one does not come up, or dies.
        """
        model, config, pool = self._model, self._config, self._pool
        with self._loading("ask for fewer ranks; each needs memory for what it loads"):
            if config.vae_ranks > 1 and self._decoder is None:
                part = VaePart(self._choice)
                pool.load(VAE, part, ranks=config.vae_ranks, own=lambda: model.vae)
                tiles = PatchParallelDecoder(pool, ranks=config.vae_ranks, part=VAE)
                self._decoder = SpreadDecoder(tiles, alone=model.decoder)
                model.decoder = self._decoder.decode
            if config.step_ranks > 1 and with_branches and self._branches is None:
                ranks, is_split = config.step_ranks, config.context_ranks > 1
                branches = ParallelBranches(
                    pool, ranks=ranks, part=TRANSFORMER, splits_tokens=is_split
                )
                # No method of this object: the pool knows the model, and would keep both.
                runner = partial(_ready_branches, branches, pool, ranks, self._choice, model)
                self._branches, model.branch_runner = runner(), runner
                if is_split:
                    pool.stopped.append(model.context.forget)

    def release_branches(self) -> None:
        """Have no rank hold a transformer but the first; the next job's branches bring them back.

        The ranks start anew: a decode has run out of memory, and what failed has ended most of them
        already.
        """
        if TRANSFORMER in self._pool.parts:
            self._pool.unload(TRANSFORMER)

    def report(self) -> ParallelReport:
        one, decoder = self._branches, self._decoder
        is_split, ranks = one is not None and one.splits_tokens, 1 if one is None else one.ranks
        return ParallelReport(
            branch_ranks=1 if is_split else ranks,
            decode=None if decoder is None else _rounded(decoder.report),
            context_ranks=ranks if is_split else 1,
        )


class SpreadDecoder:
    """The decode of several ranks: tiles where the library would cut, otherwise rank 0's
    own decode, whose bits are then the one process's in any case.
    """

    def __init__(self, tiles: PatchParallelDecoder, *, alone: LatentDecoder) -> None:
        self._tiles, self._alone = tiles, alone
        self.report: DecodeReport | None = None

    def decode(self, latents_BCFYX: Tensor, tiling: TileRule | None) -> Iterator[Tensor]:
        """Pixels in about -1..1, [B, 3, t, H, W]. Raises RankError where a rank dies or fails,
        torch.OutOfMemoryError where one of them has too little memory.
        """
        self.report = None
        if tiling and is_cut_by(tiling, latents_BCFYX):
            yield self._tiles.decode(latents_BCFYX, tiling)
            self.report = self._tiles.report
        else:
            yield from self._alone(latents_BCFYX, tiling)


def spread(model: LatentVideoModel) -> SpreadModel:
    """The model, if ranks can share its work. Raises MachineError."""
    if not isinstance(model, SpreadModel):
        raise MachineError(
            f"{model.card.name} has neither tiles nor guidance branches to share",
            hint="leave out --vae-patch-parallel-size, --cfg-parallel-size and "
            "--context-parallel-size; --replicas share the jobs",
            code="machine.ranks",
        )
    return model


def _ready_branches(
    branches: ParallelBranches,
    pool: RankPool,
    ranks: int,
    choice: ModelChoice,
    model: LatentVideoModel,
) -> ParallelBranches:
    """`branches`, each rank's transformer read where it is not there."""
    if TRANSFORMER not in pool.parts:
        pool.load(TRANSFORMER, TransformerPart(choice), ranks=ranks, own=partial(_ready, model))
    return branches


def _ready(model: LatentVideoModel) -> LatentVideoModel:
    model.load_transformer()
    return model


def _opened(choice: ModelChoice, rank: Rank) -> LatentVideoModel:
    return registry.load_video(replace(choice, device=str(rank.device)))


def _rounded(report: DecodeReport | None) -> DecodeReport | None:
    """Seconds as a line's other times have them."""
    if report is None:
        return None
    ranks = tuple(replace(one, busy_s=round(one.busy_s, 6)) for one in report.ranks)
    seconds = {name: round(getattr(report, name), 6) for name in ("gather_s", "merge_s", "total_s")}
    return DecodeReport(ranks, **seconds)
