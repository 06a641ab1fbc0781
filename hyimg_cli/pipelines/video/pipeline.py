"""Videos at work: a model, the embedded prompts, and the latents of what is not done yet."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS, START_PICTURES
from hyimg_cli.errors import JobError
from hyimg_cli.files import remove, replace_file, storage_error
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import (
    confirm_dtype,
    file_provenance,
    key_of,
    source_digest,
    source_digests,
)
from hyimg_cli.manifest.resolved import public_line
from hyimg_cli.media.metadata import video_text
from hyimg_cli.media.xmp import EDITED, MADE, mp4_box
from hyimg_cli.memory.available import peak_memory_mb, synchronize
from hyimg_cli.memory.fit import memory_guard
from hyimg_cli.memory.refusals import refuse_unsplit_context
from hyimg_cli.models import registry
from hyimg_cli.models.latent_video import (
    ClipsModel,
    ConditionEncoder,
    ImageConditioning,
    LatentVideoModel,
    PromptEmbedding,
    PromptEncoder,
)
from hyimg_cli.pipelines.clock import PhaseClock, Shares
from hyimg_cli.pipelines.out_of_memory import Attempt
from hyimg_cli.pipelines.pipeline import Pipeline
from hyimg_cli.pipelines.ranks import VideoRanks
from hyimg_cli.pipelines.request import Facts, Lost, done_outcome
from hyimg_cli.pipelines.video.encodings import Encodings
from hyimg_cli.pipelines.video.latents_checkpoint import LatentsCheckpoint
from hyimg_cli.pipelines.video.stages import (
    Denoised,
    Frames,
    VideoStages,
    VideoWork,
    denoise_together,
    make_video,
    prewarm,
)
from hyimg_cli.settings.run import DecodeTiles, RunConfig
from hyimg_cli.spec.events import (
    Event,
    JobStarted,
    Outcome,
    OutputFile,
    Prewarmed,
    Progress,
    ReuseReport,
    VideoFile,
)
from hyimg_cli.spec.job import VideoJob

if TYPE_CHECKING:
    from hyimg_cli.media.video import VideoWriter


class VideoPipeline(Pipeline[LatentVideoModel, VideoJob, Frames]):
    """Makes videos one at a time, one model at a time."""

    def __init__(self, config: RunConfig, forget_pictures: Callable[[], object] = int) -> None:
        """`forget_pictures` drops what pictures keep on the same device for later ones."""
        super().__init__(config)
        self._ranks: VideoRanks | None = None
        self._forget_pictures = forget_pictures
        self._is_loaded = self._denoises = False
        self._prompts = Encodings[str](
            config.cache, PROMPT_EMBEDDINGS, is_on=config.reuse.prompt_cache
        )
        self._pictures = Encodings[ImageConditioning](config.cache, START_PICTURES)
        self._digest_of = cache(source_digest)
        self._denoised: set[tuple[Path, str]] = set()

    def use(
        self, model: str, jobs: Sequence[VideoJob], folder: JobFolder | None
    ) -> Iterator[Event]:
        """Every distinct string and picture is embedded before the transformer comes: the encoders,
        twice its size, never lie beside it. Where every job is denoised already, neither comes.
        """
        # A load that was cut short, by a signal or a closed generator, begins again.
        is_new = self.model != model or not self._is_loaded
        if is_new:
            self.release()
        left = self._not_denoised(jobs, folder)
        refuse_unsplit_context(left, self._config)
        needs_room = bool(left) and not self._denoises
        with memory_guard(model, left, self._config) if needs_room else nullcontext():
            yield from self._load(model, left, is_new=is_new)

    def _load(self, model: str, left: Sequence[VideoJob], *, is_new: bool) -> Iterator[Event]:
        """Load what the jobs that are not denoised need, or the VAE alone."""
        started = time.perf_counter()
        if is_new:
            # The checkpoint, none of its weights in memory yet.
            choice, parallel = replace(self._config.model, model=model), self._config.parallel
            self._model = opened = registry.load_video(choice)
            confirm_dtype(choice, opened.dtype_name)
            if parallel.ranks > 1:
                self._ranks = VideoRanks(opened, choice, parallel)
        resident = self._resident()
        opened_s = time.perf_counter() - started
        texts: list[str] = []
        for job in left:
            with suppress(JobError):  # one that will fail embeds nothing
                texts.extend(resident.texts(job))
        yield from self._prompts.ready(resident.prompts, texts)
        views = dict.fromkeys(view for job in left for view in self._views(resident, job))
        if views:
            yield from self._pictures.ready(resident.pictures, _longest_first(views))
        if is_new or (left and not self._denoises):
            started = time.perf_counter()
            if self._ranks is not None:
                self._ranks.load(with_branches=bool(left))
            if left:
                resident.load_weights()
            else:
                _ = resident.vae
            self._is_loaded, self._denoises = True, bool(left)
            load_s = opened_s + time.perf_counter() - started
            yield self._loaded(load_s, self._config.parallel.ranks)

    def work(
        self, jobs: Sequence[VideoJob], folder: JobFolder | None, started: float
    ) -> Iterator[JobStarted | Progress | Frames | Lost[VideoJob]]:
        stages = self._stages(self._prompts.of, self._pictures.of)
        waits, shares = partial(synchronize, [stages.model.device]), Shares()
        model = stages.model
        most = self._config.batch.clips if isinstance(model, ClipsModel) else 1
        # Clips of one size, length and schedule are denoised together.
        alike: dict[float, list[VideoJob]] = defaultdict(list)
        for job in jobs:
            alike[job.flow_shift].append(job)
        parts = [same[n : n + most] for same in alike.values() for n in range(0, len(same), most)]
        for some in parts:
            self._revive()
            works = [self._begin(job, folder, PhaseClock(started, waits, shares)) for job in some]
            yield from (JobStarted(job.custom_id) for job in some)
            done: dict[str, Denoised] = {}
            if len(some) > 1 and isinstance(model, ClipsModel):
                done = yield from denoise_together(works, stages, model)
            for work in works:
                with Attempt() as tried:
                    frames = yield from make_video(work, stages, done.get(work.job.custom_id))
                    frames.parallel = None if self._ranks is None else self._ranks.report()
                    yield frames
                if tried.error is not None:
                    yield work.as_lost(tried.error)

    def _begin(self, job: VideoJob, folder: JobFolder | None, clock: PhaseClock) -> VideoWork:
        work = VideoWork(job, clock, source_digests=self._digests(job))
        if folder is not None:
            work.checkpoint = self._checkpoint(job, folder, work.warnings)
            work.new_writer = partial(self._new_writer, job, folder)
        return work

    def write(self, done: Frames, folder: JobFolder) -> VideoFile:
        """The sidecar, the frames, then the video: whoever sees the video sees the others."""
        job, writer = done.job, done.writer
        assert writer is not None, "where there is a folder there is a file"
        path, frames = writer.path, writer.frames_folder
        with closing(writer):
            try:
                # What an earlier video of this name has beside it would tell of another job.
                for suffix in (".json", ".frames"):
                    remove(path.with_suffix(suffix))
                if writer.comment is not None:
                    replace_file(path.with_suffix(".json"), f"{writer.comment}\n".encode())
            except OSError as error:
                raise storage_error(error, path.parent) from error
            written = writer.finish()
        return VideoFile(
            path=path.relative_to(folder.folder).as_posix(),
            sha256=written.sha256,
            pixel_sha256=written.pixel_sha256,
            width=written.width,
            height=written.height,
            seed=job.seed,
            num_frames=written.num_frames,
            fps=job.fps,
            frames_path=frames.relative_to(folder.folder).as_posix() if frames else None,
        )

    def _new_writer(
        self, job: VideoJob, folder: JobFolder, tiles: DecodeTiles | None
    ) -> "VideoWriter":
        """Begin the job's file, under a temporary name; `tiles`: of its decode, where they are not
        what was asked for.
        """
        # Imported here: a run of pictures needs no PyAV.
        from hyimg_cli.media.video import VideoWriter

        config, path = self._config, folder.place_for(job, ".mp4")
        frames = path.with_suffix(".frames") if config.output.frames == "png" else None
        text, box = None, b""
        if config.output.metadata:
            if tiles is not None:
                config = replace(config, model=replace(config.model, decode_tiles=tiles))
            made_by = file_provenance(job, config)
            text = video_text(public_line(job), made_by, self._digests(job))
            box = mp4_box(EDITED if job.images else MADE)
        return VideoWriter(path, fps=job.fps, comment=text, box=box, frames_folder=frames)

    def outcome(self, done: Frames, output: OutputFile | None, facts: Facts) -> Outcome:
        return done_outcome(
            done,
            output,
            facts,
            denoise_steps=done.denoise_steps,
            step_cache=done.step_cache,
            kv_reuse=ReuseReport("none", 0, 0, 0, (), reason=f"{done.job.task} has no text stage"),
            batch={"denoise": done.together},
            sigmas=self._resident().sigmas(done.job) if done.job.scheduler else None,
            parallel=done.parallel,
        )

    def forget(self) -> None:
        self._prompts.clear()
        self._pictures.clear()
        self._digest_of.cache_clear()
        self._denoised.clear()

    def release(self) -> None:
        super().release()
        self._is_loaded = self._denoises = False

    def cache_counts(self) -> dict[str, dict[str, int]]:
        model, counts = self._resident(), {"prompt_embeddings": self._prompts.counts()}
        runs = dict(model.prompts.encoder_runs)
        if model.card.start is not None:
            counts["start_pictures"] = self._pictures.counts()
            runs |= model.pictures.encoder_runs
        return counts | {"encoder_runs": runs}

    def peak_memory_mb(self) -> float:
        return peak_memory_mb([self._resident().device])

    def _prewarm(self, jobs: Sequence[VideoJob], folder: JobFolder | None) -> Prewarmed:
        left = self._not_denoised(jobs, folder)
        stages = self._stages(self._prompts.look, self._pictures.look)
        return Prewarmed(prewarm(left, stages, warmed=self._warmed), 0.0)

    def _stages(
        self,
        embed: Callable[[PromptEncoder, str], PromptEmbedding],
        see: Callable[[ConditionEncoder[ImageConditioning], ImageConditioning], PromptEmbedding],
    ) -> VideoStages:
        model = self._resident()

        def views(job: VideoJob) -> dict[str, PromptEmbedding]:
            return {view.kind: see(model.pictures, view) for view in self._views(model, job)}

        embedded, compiles = partial(embed, model.prompts), self._config.model.compile_blocks
        return VideoStages(model, embedded, views, self._drop, self._drop_transformer, compiles)

    def _views(self, model: LatentVideoModel, job: VideoJob) -> tuple[ImageConditioning, ...]:
        return model.pictures.views(job, self._digests(job)) if job.images else ()

    def _digests(self, job: VideoJob) -> tuple[str, ...]:
        return tuple(source_digests(job, self._digest_of))

    def _drop(self) -> None:
        """Free what is on the device and no step needs: encoders, and what pictures keep there."""
        model = self._resident()
        model.prompts.release()
        if model.card.start is not None:
            model.pictures.release()
        self._forget_pictures()

    def _drop_transformer(self) -> None:
        self._resident().release_transformer()
        if self._ranks is not None:
            self._ranks.release_branches()

    def _not_denoised(self, jobs: Sequence[VideoJob], folder: JobFolder | None) -> list[VideoJob]:
        """Those that need more than their decode: whose last latents neither are kept nor were,
        until they were done.
        """
        if folder is None:
            return list(jobs)
        left: list[VideoJob] = []
        for job in jobs:
            checkpoint = self._checkpoint(job, folder, [])
            place = (checkpoint.path, checkpoint.key)
            if place not in self._denoised and checkpoint.found() and checkpoint.holds_last:
                self._denoised.add(place)
            if place not in self._denoised:
                left.append(job)
        return left

    def _checkpoint(self, job: VideoJob, folder: JobFolder, notes: list[str]) -> LatentsCheckpoint:
        key = key_of(job, self._digests(job), self._config)
        every = self._config.output.checkpoint_every
        return LatentsCheckpoint(folder.latents_for(job.custom_id), key, every, notes)


def _longest_first(views: Collection[ImageConditioning]) -> list[ImageConditioning]:
    """The views of one picture together, that of most frames first: the others are a part of it."""
    order: dict[ImageConditioning, int] = {}
    for view in views:
        order.setdefault(replace(view, num_frames=0), len(order))
    return sorted(views, key=lambda view: (order[replace(view, num_frames=0)], -view.num_frames))
