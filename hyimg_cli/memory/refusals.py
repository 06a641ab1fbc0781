"""Refuse memory and rank settings that a run cannot follow, and disks that are too small.

No torch.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from hyimg_cli.cache.disk import refuse_cache_file
from hyimg_cli.errors import MachineError, StorageError, UsageError, installation
from hyimg_cli.files import nearest_existing
from hyimg_cli.journal.keys import precision
from hyimg_cli.models.registry import model_card, refuse_unfollowed, sequences, video_card
from hyimg_cli.settings.run import CONTEXT_BACKENDS, ModelChoice, ParallelConfig, RunConfig
from hyimg_cli.spec.compilers import COMPILER_HINT, compiler_lacks, triton_lacks
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.units import bytes_text
from hyimg_cli.spec.work import film_bytes, video_work

UTILIZATION = "--gpu-memory-utilization"
OFFLOAD = "--cpu-offload"
OFFLOAD_EXPERTS = "--offload-experts"
QUANTIZATION = "--quantization"
COMPILE = "--compile-blocks"
TENSOR, _CFG, _CONTEXT = (f"--{name}-parallel-size" for name in ("tensor", "cfg", "context"))
# Slugs that are not named after their flag.
_CODES = {
    UTILIZATION: "usage.gpu-memory",
    OFFLOAD: "usage.cpu-offload",
    OFFLOAD_EXPERTS: "usage.cpu-offload",
    QUANTIZATION: "usage.quantization",
    COMPILE: "usage.quantization",
    TENSOR: "usage.tensor-parallel",
    _CFG: "usage.tensor-parallel",
    _CONTEXT: "usage.context-parallel",
}


def refuse_settings(jobs: Sequence[Job], config: RunConfig) -> None:
    """Raise UsageError if these jobs' run cannot follow its settings of memory and ranks.

    Raises MachineError if this machine cannot compile.
    """
    refuse_conflicts(jobs, config)
    choice = config.model
    if config.parallel.ray_address is not None and choice.machine is None:
        return  # each session checks on the machine where it works
    refuse_gpu_part(config)
    if choice.cpu_offload != "none":
        refuse_offload_on_cpu(choice)
    if choice.offloads_experts and any(isinstance(job, ImageJob) for job in jobs):
        refuse_offload_on_cpu(choice, OFFLOAD_EXPERTS)
    if choice.compile_blocks and choice.machine is None:
        _refuse_without_compiler(choice)
    if choice.quantization == "nf4" and any(is_latent(job, config) for job in jobs):
        is_on_cpu = precision(choice)[0] == "cpu"
        if is_on_cpu or (choice.machine is None and find_spec("bitsandbytes") is None):
            why = "this run is on the CPU" if is_on_cpu else "bitsandbytes is not installed"
            what = f"4 bits for a diffusers transformer need bitsandbytes and a GPU, but {why}"
            hint = f"on a machine with a GPU, {installation('nf4')}; or use {QUANTIZATION} fp8"
            raise _refused(what, hint, QUANTIZATION)


def _refuse_without_compiler(choice: ModelChoice) -> None:
    """Raise MachineError if torch cannot compile a transformer's blocks on this machine."""
    is_on_cpu = precision(choice)[0] == "cpu"
    lacking = compiler_lacks(is_cpp=True) if is_on_cpu else triton_lacks()
    if lacking:
        raise MachineError(
            f"--compile-blocks cannot be used here: {lacking}",
            hint=f"remove it, or {COMPILER_HINT}",
            code="machine.compiler",
        )


def refuse_conflicts(jobs: Sequence[Job], config: RunConfig) -> None:
    """Raise UsageError for settings that contradict each other, or that a model cannot follow.

    Models are the jobs'; these settings fail on any machine.
    """
    choice, parallel = config.model, config.parallel
    pictures = dict.fromkeys(job.model for job in jobs if isinstance(job, ImageJob))
    if choice.cpu_offload != "none" and not all(is_latent(job, config) for job in jobs):
        what = "this model uses one network from the first token to the last step, so no part can"
        hint = f"use {QUANTIZATION} nf4 or fp8, or {OFFLOAD_EXPERTS}"
        hint += "; run the manifest's videos separately"
        raise _refused(f"{what} wait in main memory", hint, OFFLOAD)
    if choice.cpu_offload != "none" and parallel.vae_ranks > 1 and parallel.step_ranks > 1:
        flag = _CFG if parallel.cfg_ranks > 1 else _CONTEXT
        what = f"with both --vae-patch-parallel-size and {flag}, a process holds a VAE in addition"
        raise _refused(f"{what} to its transformer", "remove one of the two", OFFLOAD)
    for model in pictures:
        of_model = replace(choice, model=model)
        _refuse_of_pictures(of_model, parallel)
        refuse_unfollowed(of_model, **vars(config))
        _refuse_of_packed(of_model)
    for model in dict.fromkeys(job.model for job in jobs if isinstance(job, VideoJob)):
        refuse_unfollowed(replace(choice, model=model), "videos")
    for job in jobs:
        if isinstance(job, VideoJob) and parallel.context_ranks > 1:
            _refuse_unsplit_tokens(job, config)


def _refuse_of_packed(choice: ModelChoice) -> None:
    """Raise UsageError for settings that a file stored in few bits cannot follow."""
    card = model_card(choice.model, choice.revision)
    packed = None if card.networks is None else card.networks.packed
    if packed is None:
        return
    if choice.quantization != "none":
        what = f"{card.name} is {packed.form}, which is packed already"
        raise _refused(what, f"remove {QUANTIZATION}, or use the BF16 file", QUANTIZATION)
    if choice.compile_blocks and packed.nbytes:
        # Compiled, the library's unpacking rounds otherwise: another picture.
        what = f"{card.name} is {packed.form}, whose unpacking cannot be compiled"
        raise _refused(what, f"remove {COMPILE}, or use the BF16 file", COMPILE)


def refuse_gpu_part(config: RunConfig) -> None:
    """Raise UsageError for a limit of GPU memory if the run is on the CPU."""
    part = config.batch.gpu_memory_utilization
    if part is not None and precision(config.model)[0] == "cpu":
        what = f"the limit is {part:g} of a GPU's memory, but this run is on the CPU"
        hint = "limit main memory with [batch] memory_gb = 32 in a recipe, or use a GPU with "
        raise _refused(what, f"{hint}--device cuda", UTILIZATION)


def refuse_offload_on_cpu(choice: ModelChoice, flag: str = OFFLOAD) -> None:
    """Raise UsageError for offload without a GPU."""
    if precision(choice)[0] == "cpu":
        what = "this run is on the CPU, where everything is already in main memory"
        raise _refused(what, "remove it, or use a GPU with --device cuda", flag)


def _refuse_of_pictures(choice: ModelChoice, parallel: ParallelConfig) -> None:
    """Raise UsageError for a picture model that its settings do not fit.

    Its weights cannot be held in that format, its experts cannot be fetched, or its layers cannot
    be spread over that many ranks.
    """
    ranks, flag = parallel.picture_ranks, TENSOR if parallel.tensor_ranks > 1 else _CFG
    card, wants_graphs = model_card(choice.model, choice.revision), choice.decode_graphs == "on"
    is_quantized = choice.quantization != "none" and not card.denoises_latents
    if card.routing is None and (choice.offloads_experts or is_quantized):
        what = f"only routed experts can be offloaded or quantized, and {choice.model} has none"
        asked = OFFLOAD_EXPERTS if choice.offloads_experts else QUANTIZATION
        raise _refused(what, "remove it", asked)
    if choice.offloads_experts:
        if choice.device == "balanced" or ranks > 1:
            hint = "remove it: several GPUs share the layers"
            raise _refused("experts can be fetched to one GPU only", hint, OFFLOAD_EXPERTS)
        if wants_graphs:
            what = "CUDA graphs cannot fetch experts"
            raise _refused(what, "remove decode_graphs", OFFLOAD_EXPERTS)
    if ranks == 1:
        return
    if choice.device not in ("auto", "cpu", "cuda", "cuda:0"):
        what = f"--device {choice.device} cannot be used with {ranks} processes, which have one"
        hint = "remove --device, and choose GPUs with CUDA_VISIBLE_DEVICES"
        raise _refused(f"{what} GPU each, counted from the first", hint, flag)
    if wants_graphs:
        what = f"decode_graphs needs one process, not {ranks}"
        raise _refused(what, f"remove decode_graphs or {flag}", flag)
    known = sequences(choice.model, choice.revision)
    known.refuse_uneven(parallel.tensor_ranks, choice.quantization)


def is_latent(job: Job, config: RunConfig) -> bool:
    """Return True if a job's model only denoises latents."""
    return (
        isinstance(job, VideoJob) or model_card(job.model, config.model.revision).denoises_latents
    )


def _refuse_unsplit_tokens(job: VideoJob, config: RunConfig) -> None:
    """Raise UsageError for a video whose tokens and heads its ranks cannot share as asked."""
    parallel, choice = config.parallel, config.model
    card = video_card(job.model, choice.revision, choice.video_components)
    ranks = parallel.context_ranks
    heads, tokens = card.context_heads, video_work(job, card).tokens
    wholes = [str(n) for n in range(2, heads + 1) if heads % n == 0 and tokens % n == 0]
    even = f"{_CONTEXT} {' or '.join(wholes)}" if wholes else "another size, or number of frames"
    if parallel.cfg_ranks > 1:
        what, hint = "each of its processes computes both guidance branches", f"remove {_CFG}"
    elif parallel.vae_ranks > ranks:
        what = f"{parallel.vae_ranks} processes decode, but only {ranks} denoise"
        hint = f"use --vae-patch-parallel-size {ranks} or less"
    elif choice.cpu_offload == "group":
        what = "blocks that are moved one at a time cannot be split"
        hint = f"use {OFFLOAD} model"
    elif choice.attention_backend not in CONTEXT_BACKENDS:
        what = f"attention backend {choice.attention_backend} cannot be split"
        hint = f"use one of {', '.join(CONTEXT_BACKENDS)}"
    elif not heads:
        what = f"{card.name} cannot be split: diffusers has no plan for its transformer"
        hint = f"remove it; {_CFG} 2 and --replicas share the work instead"
    elif heads % ranks:
        what = f"the {heads} attention heads of {card.name} cannot be divided by {ranks}"
        hint = even
    elif tokens % ranks:
        what = f"{job.custom_id} has {tokens} tokens ({job.size}, {job.num_frames} frames)"
        what, hint = f"{what}, not a multiple of {ranks}", even
    else:
        return
    raise _refused(what, hint, _CONTEXT)


def refuse_full_disk(folder: Path, jobs: Sequence[VideoJob], config: RunConfig) -> None:
    """Raise StorageError if `folder`, which may not exist yet, has too little room for videos.

    Also if the disk cache's folder is unusable. Pictures are too small to count.
    """
    if not jobs:
        return
    refuse_cache_file(config.cache.folder)
    chosen = config.model.revision, config.model.video_components
    works = [video_work(job, video_card(job.model, *chosen)) for job in jobs]
    pixels = sum(work.pixels for work in works)
    # The latents of the current one, and the copy that replaces them.
    latents_bytes = 2 * max(work.latents_bytes for work in works)
    needed = film_bytes(pixels, with_frames=config.output.frames != "none") + latents_bytes
    if needed > (free := shutil.disk_usage(nearest_existing(folder)).free):
        what = f"the videos will take about {bytes_text(needed)}, and {bytes_text(free)} are free"
        hint = "free some space, choose another folder with -o, or run fewer jobs with --limit"
        raise StorageError(what, where=folder, hint=hint, code="storage.full")


def _refused(what: str, hint: str, flag: str) -> UsageError:
    return UsageError(what, where=flag, hint=hint, code=_CODES[flag])
