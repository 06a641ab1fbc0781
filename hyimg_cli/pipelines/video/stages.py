"""One video from job to frames, a stage a call: encode, denoise, decode_latents, then written.

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
from hyimg_cli.pipelines.video.interim import Halfway, Interim
from hyimg_cli.spec.events import DenoiseStep, PhaseStarted, Progress
from hyimg_cli.spec.job import VideoJob

Embed = Callable[[str], PromptEmbedding]


@dataclass(frozen=True)
class Set:
    """What every job of a group works with. `interim_of` gives the place for a job's latents on
    their way, None where they are not kept.
    """

    model: LatentVideoModel
    embed: Embed
    interim_of: Callable[[VideoJob], Interim | None] = lambda _job: None


@dataclass(frozen=True)
class Footage:
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


def shoot(job: VideoJob, on: Set, clock: PhaseClock) -> Generator[Progress, None, Footage]:
    """The whole story of a job but for its writing; tells what it does on the way."""
    # 1. encode: every string the job reads, mostly from memory.
    yield PhaseStarted(job.custom_id, "encode")
    clock.enter("encode")
    embeddings = {text: on.embed(text) for text in dict.fromkeys(on.model.texts(job))}
    # 2. denoise: all steps, or those behind the latents that a killed run left.
    yield PhaseStarted(job.custom_id, "denoise", job.num_inference_steps)
    clock.enter("denoise_first")
    denoised = yield from denoise(job, embeddings, on, clock)
    # 3. decode_latents.
    yield PhaseStarted(job.custom_id, "decode_latents")
    clock.enter("decode_latents")
    pieces = tuple(checked(job, on.model.decode_latents(denoised.latents_BCFYX)))
    clock.enter("queue")
    # 4. write: in a thread beside the next job.
    texts = (note for embedding in embeddings.values() for note in embedding.notes)
    notes = tuple(dict.fromkeys((*texts, *denoised.notes)))
    return Footage(pieces, denoised.steps, notes)


def denoise(
    job: VideoJob, embeddings: Mapping[str, PromptEmbedding], on: Set, clock: PhaseClock
) -> Generator[Progress, None, Denoised]:
    """Every denoise step that is left; nothing of them is read on the host unless it is kept."""
    denoiser = on.model.denoiser(job, embeddings)
    interim = on.interim_of(job)
    start, latents_BCFYX = _start(denoiser, interim, on.model)
    for index in range(start, denoiser.steps):
        latents_BCFYX = denoiser.step(index, latents_BCFYX)
        if index == start:
            clock.enter("denoise_rest")
        if interim is not None and interim.is_due(index + 1, denoiser.steps):
            clock.enter("write")
            interim.keep(Halfway(index + 1, latents_BCFYX, denoiser.state()))
            clock.enter("denoise_rest")
        yield DenoiseStep(job.custom_id, index + 1, denoiser.steps)
    notes = () if interim is None else interim.notes
    return Denoised(latents_BCFYX, denoiser.steps - start, notes)


def _start(
    denoiser: VideoDenoiser, interim: Interim | None, model: LatentVideoModel
) -> tuple[int, Tensor]:
    """The first step that is left, and the latents before it: kept ones, or noise."""
    halfway = None if interim is None else interim.found(denoiser.steps)
    if halfway is None:
        return 0, denoiser.initial_latents()
    denoiser.restore(halfway.step, halfway.state)
    return halfway.step, halfway.latents_BCFYX.to(model.device)


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
