"""One video from job to frames, a stage a call: encode, denoise, decode_latents, then written.
Latents that an earlier attempt has kept stand for the steps before them.

A video is encoded while it is decoded; no more than two pieces of its frames are held:

    decode    piece 1 ▸ piece 2 ▸ piece 3 ▸ ..         in the run's own thread
    encode              piece 1 ▸ piece 2 ▸ ..         in another; the decode waits for it
    write                                   tail ▸ name, while the next job is denoised

A stage raises JobError for what is wrong with its job alone. Nothing of a job outlives it: its
denoiser is made for it, whatever became of the one before. Clips that are denoised together, where
that was asked for since it rounds differently, are encoded and decoded alone, with their own noise,
camera, text and picture.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.errors import OutputError
from hyimg_cli.models.latent_video import (
    LATENTS,
    ClipsModel,
    LatentVideoModel,
    PromptEmbedding,
    VideoDenoiser,
)
from hyimg_cli.pipelines.clock import PhaseClock, compiling_apart
from hyimg_cli.pipelines.out_of_memory import Attempt, MemoryPolicy
from hyimg_cli.pipelines.prefetch import WriteBehind
from hyimg_cli.pipelines.request import Finished, Request
from hyimg_cli.pipelines.video.latents_checkpoint import Kept, LatentsCheckpoint
from hyimg_cli.settings.run import DecodeTiles
from hyimg_cli.spec.card import TileRule
from hyimg_cli.spec.events import ParallelReport, Progress, StepCacheReport
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.work import video_work

if TYPE_CHECKING:
    from hyimg_cli.media.video import VideoWriter

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Stage: TypeAlias = Generator[Progress, None, Result]
Embed = Callable[[str], PromptEmbedding]
# Begins a new file; given the tiles of a decode that was short of memory, None for the model's own.
NewWriter = Callable[[DecodeTiles | None], "VideoWriter"]
# What a job's forwards depend on but for the length of its text, which is trimmed to each prompt:
# model, size, frames, branches.
VideoShape = tuple[str, Size, int, int]
# Videos of a shape that are worth a step beforehand.
_FEWEST = 3
_KEPT = "its denoised latents are kept: the next attempt only decodes them"


@dataclass(frozen=True)
class VideoStages:
    """Parts that all jobs of a group share. `see` gives the views of a job's start pictures, by
    kind; `drop` frees on the device what is kept for others, `drop_transformer` that, on every
    rank: the next job's branches bring it back. `compiles`: blocks, as they are met.
    """

    model: LatentVideoModel
    embed: Embed
    see: Callable[[VideoJob], Mapping[str, PromptEmbedding]]
    drop: Callable[[], object]
    drop_transformer: Callable[[], object]
    compiles: bool = False


@dataclass(eq=False)
class VideoWork(Request[VideoJob]):
    """A video on its way. `checkpoint`: the place for its latents; `new_writer`: begins its file;
    None where nothing is written.
    """

    checkpoint: LatentsCheckpoint | None = None
    new_writer: NewWriter | None = None


@dataclass(frozen=True)
class EncodedConditions:
    """Conditions of a job's denoising: embeddings by text, views of its pictures by kind;
    `warnings` of what was cut or left out on the way, `notes` of what reading the pictures changed.
    """

    texts: Mapping[str, PromptEmbedding]
    views: Mapping[str, PromptEmbedding]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Denoised:
    """Latents behind the last of `steps` denoise steps, how many a step cache estimated, and of how
    many clips that were denoised `together` they are.
    """

    latents_BCFYX: Tensor
    steps: int
    step_cache: StepCacheReport | None = None
    together: int = 1


@dataclass(eq=False, kw_only=True)
class Frames(Finished[VideoJob]):
    """A video, every frame of it encoded by `writer`, None where it is written nowhere;
    `parallel`: over which ranks, None without.

    `denoise_steps` are those of this run: a job that went on from kept latents has fewer;
    `step_cache` counts those of all its attempts.
    """

    writer: "VideoWriter | None"
    denoise_steps: int
    step_cache: StepCacheReport | None = None
    together: int = 1
    parallel: ParallelReport | None = None


def make_video(work: VideoWork, stages: VideoStages, denoised: Denoised | None) -> Stage[Frames]:
    """The whole story of a job but for the end of its file; each stage is tried as `out_of_memory`
    says. `denoised`: together with others, before.
    """
    checkpoint = work.checkpoint
    work.clock.enter("read")
    kept = None if checkpoint is None or denoised is not None else checkpoint.found()
    if kept is not None and kept.is_last:
        work.warnings.extend(kept.warnings)
        work.notes.extend(kept.notes)
        counted = VelocityCache(work.job.step_cache, ())
        counted.restore(kept.state, stages.model.device)
        latents_BCFYX = kept.latents_BCFYX.to(stages.model.device)
        denoised = Denoised(latents_BCFYX, kept.steps, counted.report())
    elif denoised is None:
        encoded = yield from _alone(work, stages, lambda: encode(work, stages))
        denoised = yield from _alone(work, stages, lambda: denoise(work, encoded, stages))
    if checkpoint is not None and checkpoint.holds_last:
        work.warnings_if_lost.append(_KEPT)
    writer = yield from _decode_alone(work, denoised, stages)
    done = denoised.steps - (0 if kept is None else kept.step)
    return Frames(
        **vars(work.as_begun()),
        writer=writer,
        denoise_steps=done,
        step_cache=denoised.step_cache,
        together=denoised.together,
    )


def _alone(
    work: VideoWork, stages: VideoStages, stage: Callable[[], Stage[Result]]
) -> Stage[Result]:
    memory = MemoryPolicy(stages.drop, "the text encoders and the prefixes of pictures")
    return memory.alone(work, stage)


def _decode_alone(
    work: VideoWork, denoised: Denoised, stages: VideoStages
) -> Stage["VideoWriter | None"]:
    """The decode where memory may be short: once more without the transformer on the device, the
    same pixels; then in smaller tiles. Each time the file begins anew.
    """
    own = partial(decode, work, denoised, stages)

    def drop() -> None:
        stages.drop()
        stages.drop_transformer()

    def smaller() -> Iterator[tuple[str, Callable[[], Stage["VideoWriter | None"]]]]:
        for tiles, tiling in stages.model.smaller_tilings(denoised.latents_BCFYX):
            side = tiling.tile * stages.model.card.pixels_per_cell
            note = (
                f"out of memory in the decode; it went on in tiles of {side} pixels: other pixels "
                "near their borders"
            )
            yield note, partial(own, tiles, tiling)

    memory = MemoryPolicy(drop, "the text encoders, the transformer and the prefixes of pictures")
    return memory.alone(work, own, smaller())


def encode(work: VideoWork, stages: VideoStages) -> Stage[EncodedConditions]:
    """Embed every string and picture the job reads; mostly it is in memory."""
    job = work.job
    yield Progress(job.custom_id, "encode")
    work.clock.enter("encode")
    texts = dict.fromkeys(stages.model.texts(job))
    views = stages.see(job) if job.images else {}
    embedded = {text: stages.embed(text) for text in texts}
    warnings = [note for one in embedded.values() for note in one.notes]
    for one in (*embedded.values(), *views.values()):
        warnings.extend(one.warnings)
    warnings.extend(stages.model.notes(job))
    notes = dict.fromkeys(note for view in views.values() for note in view.notes)
    work.warnings.extend(dict.fromkeys(warnings))
    work.notes.extend(notes)
    return EncodedConditions(embedded, views, tuple(dict.fromkeys(warnings)), tuple(notes))


def denoise(work: VideoWork, encoded: EncodedConditions, stages: VideoStages) -> Stage[Denoised]:
    """Every denoise step behind the kept latents."""
    start = {kind: view.tensors[kind] for kind, view in encoded.views.items()}
    begin = partial(stages.model.denoiser, work.job, encoded.texts, start)
    kept = None if work.checkpoint is None else work.checkpoint.found()
    (denoised,) = yield from denoise_all([work], [encoded], stages, begin, kept)
    return denoised


def denoise_all(
    works: Sequence[VideoWork],
    encoded: Sequence[EncodedConditions],
    stages: VideoStages,
    begin: Callable[[], VideoDenoiser],
    kept: Kept | None = None,
) -> Stage[list[Denoised]]:
    """Every denoise step of one video, behind its `kept` latents, or of several clips together;
    none is read on the host unless it is kept.
    """
    for work in works:
        count = video_work(work.job, stages.model.card).steps
        yield Progress(work.job.custom_id, "denoise", 0, count)
        work.clock.enter("denoise_first")
    denoiser, is_alone = begin(), len(works) == 1
    if kept is None:
        first, latents_BCFYX = 0, denoiser.initial_latents()
    else:
        denoiser.restore(kept.step, kept.state)
        first, latents_BCFYX = kept.step, kept.latents_BCFYX.to(stages.model.device)
    steps, compiles = denoiser.steps, stages.compiles and is_alone
    for index in range(first, steps):
        phase, step = "denoise_first" if index == first else "denoise_rest", index + 1
        with compiling_apart(works[0].clock, phase, is_on=compiles):
            latents_BCFYX = denoiser.step(index, latents_BCFYX)
        each = zip(works, encoded, latents_BCFYX.split(1), strict=True)
        for work, conditions, latents_1CFYX in each:
            if index == first:
                work.clock.enter("denoise_rest")
            place = work.checkpoint
            if place is not None and (place.is_due(step, steps) or denoiser.is_stop(step)):
                work.clock.enter("write")
                memory = denoiser if step < steps else denoiser.velocities
                state = memory.state() if is_alone else {}
                said = (conditions.warnings, conditions.notes)
                place.keep(Kept(step, steps, latents_1CFYX, state, *said))
                work.clock.enter("denoise_rest")
            yield Progress(work.job.custom_id, "denoise", step, steps)
    report = denoiser.velocities.report() if is_alone else None
    made = latents_BCFYX.split(1)
    return [Denoised(latents_1CFYX, steps, report, len(works)) for latents_1CFYX in made]


def denoise_together(
    works: Sequence[VideoWork], stages: VideoStages, model: ClipsModel
) -> Stage[dict[str, Denoised]]:
    """Latents behind the last step by id; none of those that are to be made alone: they have kept
    latents, or, whatever went wrong, they failed together.
    """
    new = [work for work in works if not (work.checkpoint and work.checkpoint.path.exists())]
    with Attempt() as tried:
        encoded: list[EncodedConditions] = []
        for work in new:
            encoded.append((yield from encode(work, stages)))
        if len(new) < 2:
            return {}
        clips = [
            (work.job, one.texts[work.job.prompt], one.views[LATENTS].tensors[LATENTS])
            for work, one in zip(new, encoded, strict=True)
        ]
        made = yield from denoise_all(new, encoded, stages, partial(model.denoiser_of, clips))
        for work in new:
            work.clock.enter("queue")
        return {work.job.custom_id: one for work, one in zip(new, made, strict=True)}
    assert tried.error is not None, "the clips gave nothing"
    reason = "out of memory" if isinstance(tried.error, torch.OutOfMemoryError) else tried.error
    note = f"{len(new)} clips failed together ({reason}); each was made alone"
    logger.warning(note)
    for work in new:
        work.warnings.append(note)
    tried.error.__traceback__ = tried.error.__context__ = None
    torch.cuda.empty_cache()
    return {}


def prewarm(jobs: Sequence[VideoJob], stages: VideoStages, *, warmed: set[VideoShape]) -> int:
    """Run one denoise step of every shape of several jobs that is not in `warmed` yet, and add it;
    how many ran. Its latents are kept nowhere, and every random draw has a generator of its own.

    Nothing is decoded: that would cost as much as a job's own decode, and what it made ready, an
    allocator's pieces, the next denoise step gives back. A shape of one or two jobs is left alone:
    the step would cost them more than the first of them waits for it. One whose stand-in fails is
    not counted: the job itself will fail, and say why.
    """
    if not starts_slowly(stages.model.device):
        return 0
    alike: dict[VideoShape, list[VideoJob]] = defaultdict(list)
    for job in jobs:
        alike[job.model, job.size, job.num_frames, job.branch_count].append(job)
    ran = 0
    for shape in [shape for shape in alike if shape not in warmed]:
        if len(alike[shape]) < _FEWEST:
            continue
        warmed.add(shape)
        stand_in = replace(alike[shape][0], custom_id="prewarm", num_inference_steps=1)
        work = VideoWork(stand_in, PhaseClock(0.0, lambda: None))
        with Attempt() as tried:
            for _ in _encode_and_denoise(work, stages):
                pass
        ran += tried.error is None
    return ran


def starts_slowly(device: torch.device) -> bool:
    """True if the first forward of a shape takes longer there than those behind it."""
    return device.type != "cpu"


def _encode_and_denoise(work: VideoWork, stages: VideoStages) -> Stage[Denoised]:
    encoded = yield from encode(work, stages)
    return (yield from denoise(work, encoded, stages))


def decode(
    work: VideoWork,
    denoised: Denoised,
    stages: VideoStages,
    tiles: DecodeTiles | None = None,
    tiling: TileRule | None = None,
) -> Stage["VideoWriter | None"]:
    """Decode the last latents into frames, which are encoded as they come; `tiles`,
    and the `tiling` that they are: instead of the model's own.
    """
    yield Progress(work.job.custom_id, "decode_latents")
    work.clock.enter("decode_latents")
    decoded = stages.model.decode_latents(denoised.latents_BCFYX, tiling)
    writer = None if work.new_writer is None else work.new_writer(tiles)
    # Left in the middle it would go on keeping features of its frames.
    with closing(checked(work.job, decoded)) as pieces:
        if writer is None:
            deque(pieces, maxlen=0)
        else:
            work.clock.overlapped("write", _encode_beside(pieces, writer))
    work.clock.enter("queue")
    return writer


def _encode_beside(pieces: Iterator[np.ndarray], writer: "VideoWriter") -> float:
    """Encode each piece while the next one is decoded; seconds that it took. Where either fails
    nothing is left of the file.
    """
    seconds = 0.0
    try:
        with ThreadPoolExecutor(1) as thread:
            behind = WriteBehind[None](thread)
            for piece in pieces:
                seconds += sum(took for _, took in behind.finished(wait=True))
                behind.submit(partial(writer.add, piece))
            return seconds + sum(took for _, took in behind.finished(wait=True))
    except BaseException:
        writer.close()
        raise


def checked(job: VideoJob, pieces: Iterator[np.ndarray]) -> Generator[np.ndarray, None, None]:
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
