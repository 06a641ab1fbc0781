"""One video from job to frames, a stage a call: encode, denoise, decode_latents, then written.
Latents that an earlier attempt has kept stand for the steps before them.

A stage raises JobError for what is wrong with its job alone. Nothing of a job outlives it: its
denoiser is made for it, whatever became of the one before.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hyimg_cli.errors import OutputError
from hyimg_cli.models.latent_video import LatentVideoModel, PromptEmbedding, VideoDenoiser
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.video.latents_checkpoint import Kept, LatentsCheckpoint
from hyimg_cli.spec.events import DenoiseStep, PhaseStarted, Progress
from hyimg_cli.spec.job import VideoJob

Embed = Callable[[str], PromptEmbedding]


@dataclass(frozen=True)
class VideoStages:
    """What every job of a group works with."""

    model: LatentVideoModel
    embed: Embed


@dataclass(frozen=True)
class Frames:
    """A finished video in pieces of uint8 [T, H, W, 3], and how it came about.

    `denoise_steps` are those of this run: a job that went on from kept latents has fewer.
    """

    pieces: tuple[np.ndarray, ...]
    denoise_steps: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Denoised:
    """Latents behind the last step, and how many steps led to them in this run."""

    latents_BCFYX: Tensor
    steps: int
    notes: tuple[str, ...]


def make_video(
    job: VideoJob, on: VideoStages, clock: PhaseClock, checkpoint: LatentsCheckpoint | None = None
) -> Generator[Progress, None, Frames]:
    """The whole story of a job but for its writing; tells what it does on the way.

    `checkpoint`: the place for its latents, None where they are not kept.
    """
    # 1. read: the latents that an earlier attempt left.
    clock.enter("read")
    kept = None if checkpoint is None else checkpoint.found()
    if kept is not None and kept.is_last:
        denoised = Denoised(kept.latents_BCFYX.to(on.model.device), 0, kept.notes)
    else:
        # 2. encode: every string the job reads, mostly from memory.
        yield PhaseStarted(job.custom_id, "encode")
        clock.enter("encode")
        embeddings = {text: on.embed(text) for text in dict.fromkeys(on.model.texts(job))}
        # 3. denoise: all steps, or those behind the kept latents.
        yield PhaseStarted(job.custom_id, "denoise", job.num_inference_steps)
        clock.enter("denoise_first")
        denoised = yield from denoise(job, embeddings, on.model, clock, checkpoint, kept)
    # 4. decode_latents.
    yield PhaseStarted(job.custom_id, "decode_latents")
    clock.enter("decode_latents")
    pieces = tuple(checked(job, on.model.decode_latents(denoised.latents_BCFYX)))
    clock.enter("queue")
    # 5. write: in a thread beside the next job.
    ours = () if checkpoint is None else checkpoint.notes
    return Frames(pieces, denoised.steps, tuple(dict.fromkeys((*denoised.notes, *ours))))


def denoise(
    job: VideoJob,
    embeddings: Mapping[str, PromptEmbedding],
    model: LatentVideoModel,
    clock: PhaseClock,
    checkpoint: LatentsCheckpoint | None,
    kept: Kept | None,
) -> Generator[Progress, None, Denoised]:
    """Every denoise step behind `kept`; nothing of them is read on the host unless it is kept."""
    denoiser = model.denoiser(job, embeddings)
    notes = tuple(note for embedding in embeddings.values() for note in embedding.notes)
    start, latents_BCFYX = _start(denoiser, kept, model)
    for index in range(start, denoiser.steps):
        latents_BCFYX = denoiser.step(index, latents_BCFYX)
        if index == start:
            clock.enter("denoise_rest")
        step, steps = index + 1, denoiser.steps
        if checkpoint is not None and checkpoint.is_due(step, steps):
            clock.enter("write")
            state = denoiser.state() if step < steps else {}
            checkpoint.keep(Kept(step, steps, latents_BCFYX, state, notes))
            clock.enter("denoise_rest")
        yield DenoiseStep(job.custom_id, step, steps)
    return Denoised(latents_BCFYX, denoiser.steps - start, notes)


def _start(
    denoiser: VideoDenoiser, kept: Kept | None, model: LatentVideoModel
) -> tuple[int, Tensor]:
    """The first step that is left, and the latents before it: kept ones, or noise."""
    if kept is None:
        return 0, denoiser.initial_latents()
    denoiser.restore(kept.step, kept.state)
    return kept.step, kept.latents_BCFYX.to(model.device)


def checked(job: VideoJob, pieces: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """`pieces` as they come; raises OutputError where they are not the video asked for, or show
    nothing.
    """
    count, levels = 0, set[int]()
    for piece in pieces:
        size = job.size
        if piece.shape[1:] != (size.height, size.width, 3) or piece.dtype != np.uint8:
            what = f"the model gave {piece.dtype} frames of {piece.shape[1:]}, not {size}"
            raise OutputError(what, code="output-video.shape")
        count += len(piece)
        levels |= {int(piece.min()), int(piece.max())}
        yield piece
    if count != job.num_frames:
        what = f"the model gave {count} frames, not {job.num_frames}"
        raise OutputError(what, code="output-video.shape")
    if len(levels) == 1:
        raise OutputError("every pixel of every frame is the same", code="output-video.constant")
