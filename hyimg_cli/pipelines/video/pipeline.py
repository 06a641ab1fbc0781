"""Videos at work, and their files."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hyimg_cli.cache.disk import START_PICTURES
from hyimg_cli.files import remove, replace_file, storage_error
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import file_provenance
from hyimg_cli.manifest.planner import group_by
from hyimg_cli.manifest.resolved import public_line
from hyimg_cli.media.metadata import video_text
from hyimg_cli.media.xmp import EDITED, MADE, mp4_box
from hyimg_cli.models import registry
from hyimg_cli.models.latent_video import ClipsModel, LatentVideoModel
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.latent.pipeline import LatentPipeline
from hyimg_cli.pipelines.ranks import VideoRanks
from hyimg_cli.pipelines.request import Facts, done_outcome
from hyimg_cli.pipelines.video.stages import VideoRequest, VideoStages
from hyimg_cli.settings.run import DecodeTiles, ModelChoice, RunConfig
from hyimg_cli.spec.events import Outcome, OutputFile, Prewarmed, ReuseReport, VideoFile
from hyimg_cli.spec.job import VideoJob

if TYPE_CHECKING:
    from hyimg_cli.media.video import VideoWriter


class VideoPipeline(LatentPipeline[LatentVideoModel, VideoJob, VideoRequest]):
    """Makes videos one at a time, but for clips that are denoised together."""

    def __init__(self, config: RunConfig, forget_pictures: Callable[[], object] = int) -> None:
        """`forget_pictures` drops what pictures keep on the same device for later ones."""
        super().__init__(config, START_PICTURES)
        self._ranks: VideoRanks | None = None
        self._forget_pictures = forget_pictures

    def _open(self, choice: ModelChoice) -> LatentVideoModel:
        opened, parallel = registry.load_video(choice), self._config.parallel
        if parallel.ranks > 1:
            self._ranks = VideoRanks(opened, choice, parallel)
        return opened

    def _load(self, *, with_transformer: bool) -> None:
        if self._ranks is not None:
            self._ranks.load(with_branches=with_transformer)
        super()._load(with_transformer=with_transformer)

    def _parts(self, jobs: Sequence[VideoJob]) -> list[list[VideoJob]]:
        """Clips of one size, length and schedule are denoised together."""
        most = self._config.batch.clips if isinstance(self._resident(), ClipsModel) else 1
        alike = group_by(jobs, lambda job: job.flow_shift)
        return [same[n : n + most] for same in alike.values() for n in range(0, len(same), most)]

    def _new_request(
        self, job: VideoJob, clock: PhaseClock, folder: JobFolder | None
    ) -> VideoRequest:
        work = VideoRequest(job, clock, source_digests=self._digests(job))
        if folder is not None:
            work.new_writer = partial(self._new_writer, job, folder)
        return work

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

    def _prewarm(self, jobs: Sequence[VideoJob], folder: JobFolder | None) -> Prewarmed:
        left = self._not_denoised(jobs, folder)
        return Prewarmed(self._stages().prewarm(left, self._warmed), 0.0)

    def _stages(self) -> VideoStages:
        return VideoStages(
            self._resident(),
            self._encodings,
            self._forget_pictures,
            self._config.model.compile_blocks,
            self._ranks,
        )
