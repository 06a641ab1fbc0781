"""Refuse settings of memory and ranks that a run cannot follow, and a disk that cannot hold its
videos; nothing is ignored. No torch.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from hyimg_cli.errors import StorageError, UsageError
from hyimg_cli.files import nearest_existing
from hyimg_cli.journal.keys import precision
from hyimg_cli.models.registry import model_card, sequences, video_card
from hyimg_cli.settings.run import CONTEXT_BACKENDS, ModelChoice, ParallelConfig, RunConfig
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.work import film_bytes, video_work

UTILIZATION = "--gpu-memory-utilization"
OFFLOAD = "--cpu-offload"
OFFLOAD_EXPERTS = "--offload-experts"
_QUANTIZATION = "--quantization"
_TENSOR, _CFG, _CONTEXT = (f"--{name}-parallel-size" for name in ("tensor", "cfg", "context"))
_CODES = {
    _QUANTIZATION: "usage.quantization",
    UTILIZATION: "usage.gpu-memory",
    OFFLOAD: "usage.cpu-offload",
    OFFLOAD_EXPERTS: "usage.cpu-offload",
    _TENSOR: "usage.tensor-parallel",
    _CFG: "usage.tensor-parallel",
    _CONTEXT: "usage.context-parallel",
}
_DEVICES = ("auto", "cpu", "cuda", "cuda:0")


def refuse_settings(jobs: Sequence[Job], config: RunConfig) -> None:
    """Raise UsageError where these jobs' run cannot follow its settings of memory and ranks."""
    choice, pictures = config.model, [job for job in jobs if isinstance(job, ImageJob)]
    for model in dict.fromkeys(job.model for job in pictures):
        refuse_unsplit(replace(choice, model=model), config.parallel)
    refuse_unsplit_context(jobs, config)
    if config.parallel.ray_address is not None and choice.machine is None:
        return  # each session asks on the machine that it works on
    is_on_cpu = precision(choice)[0] == "cpu"
    lacks_package = choice.machine is None and find_spec("bitsandbytes") is None
    if len(pictures) < len(jobs) and choice.quantization == "nf4" and (is_on_cpu or lacks_package):
        why = "this run is on the CPU" if is_on_cpu else "bitsandbytes is not installed"
        raise _refused(
            f"a video's transformer is held in 4 bits by bitsandbytes on a GPU, and {why}",
            f"pip install 'hyimg-cli[nf4]' on a machine with a GPU; {_QUANTIZATION} fp8 needs "
            "neither",
            f"{_QUANTIZATION} nf4",
        )
    if choice.cpu_offload != "none":
        if pictures:
            raise offload_of_pictures()
        refuse_offload_on_cpu(choice)
    if choice.offloads_experts and pictures:
        refuse_experts(config)
    refuse_in_session(config)


def refuse_in_session(config: RunConfig) -> None:
    """The same for a session, which may move networks about on a CPU too. Raises UsageError."""
    parallel, part = config.parallel, config.batch.gpu_memory_utilization
    if part is not None and precision(config.model)[0] == "cpu":
        what = f"{part:g} of a GPU's memory, and this run is on the CPU"
        hint = "main memory is limited by a recipe: [batch] memory_gb = 32; a GPU is named by "
        raise _refused(what, f"{hint}--device cuda", UTILIZATION)
    if part is not None and not 0 < part <= 1:
        raise _refused(f"{part:g} is no part of a GPU's memory", "above 0 to 1", UTILIZATION)
    if config.model.cpu_offload != "none" and parallel.vae_ranks > 1 and parallel.step_ranks > 1:
        flag = _CFG if parallel.cfg_ranks > 1 else _CONTEXT
        what = f"with --vae-patch-parallel-size and {flag} together a rank holds a VAE beside its"
        raise _refused(f"{what} transformer", "give one of the two", OFFLOAD)


def refuse_unsplit(choice: ModelChoice, parallel: ParallelConfig) -> None:
    """Raise UsageError for a picture model that cannot be held in so few bits, or spread over so
    many ranks.
    """
    ranks, flag = parallel.picture_ranks, _TENSOR if parallel.tensor_ranks > 1 else _CFG
    card = model_card(choice.model, choice.revision)
    if choice.quantization != "none" and not card.weights.experts:
        what = f"{choice.model} has no routed experts, which alone are held in fewer bits"
        raise _refused(what, "leave it out", _QUANTIZATION)
    if choice.offloads_experts and card.routing is None:
        what = f"{choice.model} has no routed experts, which alone can wait in main memory"
        raise _refused(what, "leave it out", OFFLOAD_EXPERTS)
    if ranks == 1:
        return
    if choice.device not in _DEVICES:
        raise _refused(
            f"device {choice.device} and {ranks} ranks exclude each other: each rank has its own "
            "GPU, counted from the first",
            "leave out --device, and choose the GPUs by CUDA_VISIBLE_DEVICES",
            flag,
        )
    if choice.decode_graphs == "on":
        what = f"decode_graphs are one process's, not {ranks} ranks'"
        raise _refused(what, f"leave out decode_graphs or {flag}", flag)
    known = sequences(choice.model, choice.revision)
    known.refuse_uneven(parallel.tensor_ranks, choice.quantization)


def refuse_unsplit_context(jobs: Iterable[Job], config: RunConfig) -> None:
    """Raise UsageError for videos whose tokens cannot be split over ranks as asked."""
    parallel, choice = config.parallel, config.model
    ranks, videos = parallel.context_ranks, [job for job in jobs if isinstance(job, VideoJob)]
    if ranks == 1 or not videos:
        return
    if parallel.cfg_ranks > 1:
        what, hint = "each of its ranks works on both guidance branches", f"leave out {_CFG}"
    elif parallel.vae_ranks > ranks:
        what = f"{parallel.vae_ranks} ranks decode, {ranks} denoise"
        hint = f"--vae-patch-parallel-size {ranks} or less"
    elif choice.cpu_offload == "group":
        what = "blocks that come one at a time cannot be split: both hook their forwards"
        hint = f"{OFFLOAD} model"
    elif choice.attention_backend not in CONTEXT_BACKENDS:
        what = f"attention backend {choice.attention_backend} cannot be split"
        hint = f"one of {', '.join(CONTEXT_BACKENDS)}"
    else:
        for job in videos:
            _refuse_uneven(job, config)
        return
    raise _refused(what, hint, _CONTEXT)


def refuse_full_disk(folder: Path, jobs: Sequence[VideoJob], config: RunConfig) -> None:
    """Raises StorageError where `folder` surely has no room for the videos of `jobs`, or where the
    disk cache's folder can be none. Pictures are too small to be counted.
    """
    if not jobs:
        return
    # A cache folder that is missing is made later; one that is a file, or below one, never is.
    cache = nearest_existing(config.cache.folder) if config.cache.folder else None
    if cache is not None and not cache.is_dir():
        raise StorageError(
            "the disk cache's folder is a file",
            where=cache,
            hint="choose another folder with --cache-dir, or leave it out with --no-disk-cache",
            code="storage.cache",
        )
    works = [video_work(job, video_card(job.model, config.model.revision)) for job in jobs]
    with_frames = config.output.frames != "none"
    needed = film_bytes(sum(work.pixels for work in works), with_frames=with_frames)
    # Latents of the one that is under way, beside the copy that replaces them.
    needed += 2 * max(work.latents_bytes for work in works)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"the videos will take about {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free",
            where=folder,
            hint="free some space, choose another folder with -o, or run a part with --limit",
            code="storage.full",
        )


def offload_of_pictures() -> UsageError:
    """The error where a picture model's networks are to take turns."""
    return _refused(
        "one network makes a picture from its first token to its last step: none of it can wait in "
        "main memory",
        f"{_QUANTIZATION} nf4 (or fp8) holds it in less, {OFFLOAD_EXPERTS} lets experts wait; "
        "videos of the same manifest have a run of their own",
        OFFLOAD,
    )


def refuse_offload_on_cpu(choice: ModelChoice, flag: str = OFFLOAD) -> None:
    """Raise UsageError without a GPU, to which weights could come from main memory."""
    if precision(choice)[0] == "cpu":
        what = "this run is on the CPU: everything is in main memory as it is"
        raise _refused(what, "leave it out, or name a GPU by --device cuda", flag)


def _refuse_uneven(job: VideoJob, config: RunConfig) -> None:
    """Raise UsageError for heads or tokens of a video that its ranks cannot share evenly."""
    card = video_card(job.model, config.model.revision, config.model.components)
    ranks, heads = config.parallel.context_ranks, card.context_heads
    if not heads:
        what = f"{card.name} is not split: the library has no plan for its transformer"
        hint = f"leave it out; {_CFG} 2 and --replicas share its work"
        raise _refused(what, hint, _CONTEXT)
    tokens = video_work(job, card).tokens
    wholes = [str(n) for n in range(2, heads + 1) if heads % n == 0 and tokens % n == 0]
    hint = f"{_CONTEXT} {' or '.join(wholes)}" if wholes else "another size, or number of frames"
    if heads % ranks:
        what = f"{card.name} has {heads} heads of attention, not k x {ranks}"
        raise _refused(what, hint, _CONTEXT)
    if tokens % ranks:
        what = f"{job.custom_id} has {tokens} tokens ({job.size}, {job.num_frames} frames)"
        raise _refused(f"{what}, not k x {ranks}", hint, _CONTEXT)


def refuse_experts(config: RunConfig) -> None:
    """Raise UsageError where experts cannot be fetched: to one GPU they can."""
    choice = config.model
    refuse_offload_on_cpu(choice, OFFLOAD_EXPERTS)
    if choice.device == "balanced" or config.parallel.picture_ranks > 1:
        what, hint = "experts are fetched to one GPU", "leave it out: several GPUs share the layers"
        raise _refused(what, hint, OFFLOAD_EXPERTS)
    if choice.decode_graphs == "on":
        what = "a CUDA graph cannot ask which experts to fetch"
        raise _refused(what, "leave decode_graphs out", OFFLOAD_EXPERTS)


def _refused(what: str, hint: str, flag: str) -> UsageError:
    return UsageError(what, where=flag, hint=hint, code=_CODES[flag.split()[0]])
