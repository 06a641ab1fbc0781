"""Pictures over ranks, before anything is loaded: what cannot be, bytes by rank. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hyimg_cli.errors import UsageError
from hyimg_cli.journal.keys import precision
from hyimg_cli.memory.footprint import Footprint
from hyimg_cli.memory.gpu_settings import OFFLOAD_EXPERTS
from hyimg_cli.models.registry import model_card, sequences
from hyimg_cli.settings.run import ModelChoice, ParallelConfig, RunConfig
from hyimg_cli.spec.job import ImageJob, Job

_FLAG, _CFG_FLAG = "--tensor-parallel-size", "--cfg-parallel-size"
_DEVICES = ("auto", "cpu", "cuda", "cuda:0")


@dataclass(frozen=True)
class RankFootprint:
    """The bytes of one rank. Weights and K/V are exact; activations are those of one process, of
    which a rank has less.
    """

    rank: int
    weights: int
    kv: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations


def refuse_wrong(jobs: Iterable[Job], config: RunConfig) -> None:
    """Passes a run whose pictures' models can all be split as asked. Raises UsageError."""
    for model in dict.fromkeys(job.model for job in jobs if isinstance(job, ImageJob)):
        refuse_unsplit(replace(config.model, model=model), config.parallel)


def refuse_unsplit(choice: ModelChoice, parallel: ParallelConfig) -> None:
    """Passes a model that can be held in so few bits, and spread over so many ranks. Raises
    UsageError.
    """
    ranks, flag = parallel.picture_ranks, _FLAG if parallel.tensor_ranks > 1 else _CFG_FLAG
    if choice.quantization != "none":
        _refuse_without_experts(choice, "--quantization", "which alone are held in fewer bits")
    if choice.offloads_experts:
        _refuse_without_experts(choice, OFFLOAD_EXPERTS, "which alone can wait in main memory")
    if ranks == 1:
        return
    if choice.device not in _DEVICES:
        raise _refused(
            f"device {choice.device} and {ranks} ranks exclude each other: each rank has its own "
            "GPU, counted from the first",
            flag,
            hint="leave out --device, and choose the GPUs by CUDA_VISIBLE_DEVICES",
        )
    if choice.decode_graphs == "on":
        raise _refused(
            f"decode_graphs are one process's, not {ranks} ranks'",
            flag,
            hint=f"leave out decode_graphs or {flag}",
        )
    known = sequences(choice.model, choice.revision)
    known.refuse_uneven(parallel.tensor_ranks, choice.quantization)


def rank_footprints(
    memory: Mapping[str, Footprint], config: RunConfig
) -> dict[str, list[RankFootprint]]:
    """By model, what each rank holds at once of a whole footprint; empty for one process."""
    if config.parallel.picture_ranks == 1:
        return {}
    return {model: _ranks(model, one, config) for model, one in memory.items()}


def _ranks(model: str, whole: Footprint, config: RunConfig) -> list[RankFootprint]:
    choice, parallel = config.model, config.parallel
    known = sequences(model, choice.revision)
    held = known.rank_bytes(parallel.tensor_ranks, precision(choice)[1], choice.quantization)
    kv = round(whole.kv * held.kv_share)
    weights = [held.first, *[held.other] * (parallel.picture_ranks - 1)]
    return [RankFootprint(rank, count, kv, whole.activations) for rank, count in enumerate(weights)]


def _refuse_without_experts(choice: ModelChoice, flag: str, why: str) -> None:
    weights = model_card(choice.model, choice.revision).weights
    if weights is not None and not weights.experts:
        raise UsageError(
            f"{choice.model} has no routed experts, {why}",
            where=flag,
            hint="leave it out",
            code="usage.quantization",
        )


def _refused(what: str, flag: str, hint: str) -> UsageError:
    return UsageError(what, where=flag, hint=hint, code="usage.tensor-parallel")
