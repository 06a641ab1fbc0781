"""Settings about a GPU's memory: where they cannot be followed they are refused, never ignored. No
torch.
"""

from collections.abc import Sequence
from importlib.util import find_spec

from hyimg_cli.errors import UsageError
from hyimg_cli.journal.keys import precision
from hyimg_cli.settings.run import ModelChoice, ParallelConfig, RunConfig
from hyimg_cli.spec.job import ImageJob, Job, VideoJob

UTILIZATION = "--gpu-memory-utilization"
OFFLOAD = "--cpu-offload"
OFFLOAD_EXPERTS = "--offload-experts"


def refuse_unfollowed(jobs: Sequence[Job], config: RunConfig) -> None:
    """Passes settings of a GPU's memory that the jobs' run can follow. Raises UsageError."""
    if config.parallel.ray_address is not None and config.model.place is None:
        return  # each session asks on the machine that it works on
    _refuse_part(config)
    if any(isinstance(job, VideoJob) for job in jobs):
        _refuse_quantization(config.model)
    if config.model.cpu_offload != "none":
        if any(isinstance(job, ImageJob) for job in jobs):
            raise offload_of_pictures()
        refuse_offload_on_cpu(config.model)
    if config.model.offloads_experts and any(isinstance(job, ImageJob) for job in jobs):
        _refuse_experts(config)
    refuse_in_session(config)


def _refuse_experts(config: RunConfig) -> None:
    """Passes one GPU, to which experts can be fetched. Raises UsageError."""
    choice = config.model
    if precision(choice)[0] == "cpu":
        refuse_offload_on_cpu(choice, OFFLOAD_EXPERTS)
    if choice.device == "balanced" or config.parallel.picture_ranks > 1:
        what, hint = "experts are fetched to one GPU", "leave it out: several GPUs share the layers"
    elif choice.decode_graphs == "on":
        what, hint = "a CUDA graph cannot ask which experts to fetch", "leave decode_graphs out"
    else:
        return
    raise _refused(what, hint, OFFLOAD_EXPERTS)


def offload_of_pictures() -> UsageError:
    """The error where a picture model's networks are to take turns."""
    return _refused(
        "one network makes a picture from its first token to its last step: none of it can wait in "
        "main memory",
        hint=f"--quantization nf4 (or fp8) holds it in less, {OFFLOAD_EXPERTS} lets experts wait; "
        "videos of the same manifest have a run of their own",
    )


def refuse_offload_on_cpu(choice: ModelChoice, flag: str = OFFLOAD) -> None:
    """Passes a GPU, to which weights can come from main memory. Raises UsageError."""
    if precision(choice)[0] == "cpu":
        raise _refused(
            "this run is on the CPU: everything is in main memory as it is",
            hint="leave it out, or name a GPU by --device cuda",
            flag=flag,
        )


def refuse_offload_on_ranks(parallel: ParallelConfig) -> None:
    """Passes ranks of which each has one kind of network. Raises UsageError."""
    if parallel.vae_ranks > 1 and parallel.step_ranks > 1:
        flag = "--cfg-parallel-size" if parallel.cfg_ranks > 1 else "--context-parallel-size"
        raise _refused(
            f"with --vae-patch-parallel-size and {flag} together a rank holds a VAE beside its "
            "transformer",
            hint="give one of the two",
        )


def refuse_in_session(config: RunConfig) -> None:
    """The same for a session, which may move networks about on a CPU too. Raises UsageError."""
    _refuse_part(config)
    if config.model.cpu_offload != "none":
        refuse_offload_on_ranks(config.parallel)


def _refuse_quantization(choice: ModelChoice) -> None:
    """Passes a video's quantization for which its package is here. Raises UsageError."""
    if choice.quantization != "nf4":
        return
    on_cpu = precision(choice)[0] == "cpu"
    if on_cpu or (choice.place is None and find_spec("bitsandbytes") is None):
        why = "and this run is on the CPU" if on_cpu else "and bitsandbytes is not installed"
        raise UsageError(
            f"a video's transformer is held in 4 bits by bitsandbytes on a GPU, {why}",
            where="--quantization nf4",
            hint="pip install 'hyimg-cli[nf4]' on a machine with a GPU; --quantization fp8 needs "
            "neither",
            code="usage.quantization",
        )


def _refuse_part(config: RunConfig) -> None:
    part = config.batch.gpu_memory_utilization
    if part is not None and precision(config.model)[0] == "cpu":
        raise UsageError(
            f"{part:g} of a GPU's memory, and this run is on the CPU",
            where=UTILIZATION,
            hint="main memory is limited by a recipe: [batch] memory_gb = 32; a GPU is named by "
            "--device cuda",
            code="usage.gpu-memory",
        )
    if part is not None and not 0 < part <= 1:
        what = f"{part:g} is no part of a GPU's memory"
        raise UsageError(what, where=UTILIZATION, hint="above 0 to 1", code="usage.gpu-memory")


def _refused(what: str, hint: str, flag: str = OFFLOAD) -> UsageError:
    return UsageError(what, where=flag, hint=hint, code="usage.cpu-offload")
