"""Videos at work: a model, the embedded prompts, and the latents of what is not done yet."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS, START_PICTURES
from hyimg_cli.errors import JobError
from hyimg_cli.files import remove, replace_file, storage_error
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import confirm_dtype, file_provenance, key_of, source_digest
from hyimg_cli.kernels.devices import peak_memory_mb, synchronize
from hyimg_cli.manifest.resolved import public_line
from hyimg_cli.media.metadata import video_text
from hyimg_cli.media.xmp import EDITED, MADE, mp4_box
from hyimg_cli.memory.fit import memory_guard
from hyimg_cli.models import registry
from hyimg_cli.models.latent_video import ClipsModel, ImageConditioning, LatentVideoModel
from hyimg_cli.pipelines.clock import PhaseClock, Shares
from hyimg_cli.pipelines.pipeline import Pipeline
from hyimg_cli.pipelines.ranks import VideoRanks
from hyimg_cli.pipelines.request import Facts, Lost, done_outcome
from hyimg_cli.pipelines.video.encodings import Encodings
from hyimg_cli.pipelines.video.latents_checkpoint import LatentsCheckpoint
from hyimg_cli.pipelines.video.stages import VideoRequest, VideoStages
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


class VideoPipeline(Pipeline[LatentVideoModel, VideoJob, VideoRequest]):
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
        needs_room = bool(left) and not self._denoises
        with memory_guard(model, left, self._config) if needs_room else nullcontext():
            # The checkpoint, none of its weights in memory yet.
            started = time.perf_counter()
            if is_new:
                choice, parallel = replace(self._config.model, model=model), self._config.parallel
                self._model = opened = registry.load_video(choice)
                confirm_dtype(choice, opened.dtype_name)
                if parallel.ranks > 1:
                    self._ranks = VideoRanks(opened, choice, parallel)
            resident = self._resident()
            opened_s = time.perf_counter() - started
            # What the encoders make of all jobs' texts and pictures; then they go.
            texts: list[str] = []
            for job in left:
                with suppress(JobError):  # one that will fail embeds nothing
                    texts.extend(resident.texts(job))
            yield from self._prompts.ready(resident.prompts, texts)
            pictures = resident.pictures
            views = [view for job in left for view in pictures.views(job, self._digests(job))]
            yield from self._pictures.ready(pictures, views)
            # The weights that denoise and decode, or the VAE alone.
            if is_new or needs_room:
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
    ) -> Iterator[JobStarted | Progress | VideoRequest | Lost[VideoJob]]:
        stages, shares = self._stages(), Shares()
        synchronized = partial(synchronize, [stages.model.device])
        most = self._config.batch.clips if isinstance(stages.model, ClipsModel) else 1
        # Clips of one size, length and schedule are denoised together.
        alike: dict[float, list[VideoJob]] = defaultdict(list)
        for job in jobs:
            alike[job.flow_shift].append(job)
        parts = [same[n : n + most] for same in alike.values() for n in range(0, len(same), most)]
        for part in parts:
            self._revive()
            works = []
            for job in part:
                clock = PhaseClock(started, synchronized, shares)
                work = VideoRequest(job, clock, source_digests=self._digests(job))
                if folder is not None:
                    work.checkpoint = self._checkpoint(job, folder, work.warnings)
                    work.new_writer = partial(self._new_writer, job, folder)
                works.append(work)
                yield JobStarted(job.custom_id)
            yield from stages.make_videos(works)

    def write(self, done: VideoRequest, folder: JobFolder) -> VideoFile:
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

    def outcome(self, done: VideoRequest, output: OutputFile | None, facts: Facts) -> Outcome:
        return done_outcome(
            done,
            output,
            facts,
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
        return Prewarmed(self._stages().prewarm(left, self._warmed), 0.0)

    def _stages(self) -> VideoStages:
        return VideoStages(
            self._resident(),
            self._prompts,
            self._pictures,
            self._ranks,
            self._forget_pictures,
            self._config.model.compile_blocks,
        )

    def _digests(self, job: VideoJob) -> tuple[str, ...]:
        return tuple(map(self._digest_of, job.images))

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
