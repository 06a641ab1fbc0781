"""Tokens of a video's forwards split over ranks, before anything is loaded: what cannot be. No
torch.
"""

from collections.abc import Iterable

from hyimg_cli.errors import UsageError
from hyimg_cli.models.registry import video_card
from hyimg_cli.settings.run import CONTEXT_BACKENDS, RunConfig
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import Job, VideoJob
from hyimg_cli.spec.work import video_work

_FLAG = "--context-parallel-size"


def refuse_unsplit_context(jobs: Iterable[Job], config: RunConfig) -> None:
    """Passes a run whose videos' tokens can all be split as asked. Raises UsageError."""
    films = [job for job in jobs if isinstance(job, VideoJob)]
    if config.parallel.context_ranks == 1 or not films:
        return
    _refuse_settings(config)
    for job in films:
        card = video_card(job.model, config.model.revision, config.model.components)
        _refuse_uneven(job, card, config.parallel.context_ranks)


def _refuse_settings(config: RunConfig) -> None:
    """Passes settings that go with split tokens."""
    parallel, choice = config.parallel, config.model
    ranks, backend = parallel.context_ranks, choice.attention_backend
    if parallel.cfg_ranks > 1:
        what = "each of its ranks works on both guidance branches"
        raise _refused(what, "leave out --cfg-parallel-size")
    if parallel.vae_ranks > ranks:
        what = f"{parallel.vae_ranks} ranks decode, {ranks} denoise"
        raise _refused(what, f"--vae-patch-parallel-size {ranks} or less")
    if choice.cpu_offload == "group":
        what = "blocks that come one at a time cannot be split: both hook their forwards"
        raise _refused(what, "--cpu-offload model")
    if backend not in CONTEXT_BACKENDS:
        what = f"attention backend {backend} cannot be split"
        raise _refused(what, f"one of {', '.join(CONTEXT_BACKENDS)}")


def _refuse_uneven(job: VideoJob, card: VideoCard, ranks: int) -> None:
    """Passes heads and tokens that ranks can share evenly."""
    heads, tokens = card.context_heads, video_work(job, card).tokens
    if not heads:
        raise _refused(
            f"{card.name} is not split: the library has a plan for Wan's transformer alone",
            "leave it out; --cfg-parallel-size 2 and --replicas share its work",
        )
    wholes = [str(n) for n in range(2, heads + 1) if heads % n == 0 and tokens % n == 0]
    hint = f"{_FLAG} {' or '.join(wholes)}" if wholes else "another size, or number of frames"
    if heads % ranks:
        raise _refused(f"{card.name} has {heads} heads of attention, not k x {ranks}", hint)
    if tokens % ranks:
        what = f"{job.custom_id} has {tokens} tokens ({job.size}, {job.num_frames} frames)"
        raise _refused(f"{what}, not k x {ranks}", hint)


def _refused(what: str, hint: str) -> UsageError:
    return UsageError(what, where=_FLAG, hint=hint, code="usage.context-parallel")
