"""Pictures from editing models that denoise latents, one at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyimg_cli.cache.disk import SOURCE_IMAGES
from hyimg_cli.journal.edit_facts import edit_warnings
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.media.images import Pixels, on_white, read_view, stacked
from hyimg_cli.models import registry
from hyimg_cli.pipelines.latent.pipeline import Events, LatentPipeline, LatentRequest
from hyimg_cli.pipelines.prefix_tree import new_prefix_tree
from hyimg_cli.pipelines.request import confirm_visible, write_drawn, write_layers
from hyimg_cli.pipelines.round_trips import RoundTrips
from hyimg_cli.settings.run import ModelChoice, RunConfig
from hyimg_cli.spec.events import BranchTokens, OutputFile, Progress, ReuseReport
from hyimg_cli.spec.job import ImageJob, Size

if TYPE_CHECKING:
    from hyimg_cli.models.diffusers_image.model import BlockDenoiser, LatentImageModel


@dataclass(eq=False)
class EditRequest(LatentRequest[ImageJob]):
    """A picture at work.

    `branches`: token counts of its branches. `layers`: what its `pixels` are the sum of, if it has
    layers.
    """

    branches: Sequence[BranchTokens] = ()
    layers: Sequence[Pixels] = ()


class EditPipeline(LatentPipeline["LatentImageModel", ImageJob, EditRequest]):
    """Draws and edits pictures, one at a time."""

    request_kind = EditRequest

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, SOURCE_IMAGES)
        self._trips = RoundTrips()
        self.tree = new_prefix_tree(
            config.batch, lambda rows: rows.to_devices([self._resident().device] * len(rows.keys))
        )

    def forget(self) -> None:
        super().forget()
        self._trips.clear()
        self.tree.clear()

    def _open(self, choice: ModelChoice) -> "LatentImageModel":
        opened = registry.load_editor(choice)
        opened.tree = self.tree if self._config.reuse.kv_reuse else None
        return opened

    def new_denoiser(self, works: Sequence[EditRequest]) -> "BlockDenoiser":
        (work,) = works
        denoiser = self._resident().denoiser(work.job, work.embeddings, self._scope)
        work.branches = denoiser.branches
        return denoiser

    def decode(self, work: EditRequest) -> Events[EditRequest]:
        job, model = work.job, self._resident()
        assert work.latents is not None, "it is denoised"
        yield Progress(job.custom_id, "decode_latents")
        work.clock.enter("decode_latents")
        decoded = model.decode_latents(job, work.latents)
        work.layers = decoded if job.layers else ()
        # Of a picture in layers, one of them may be empty.
        work.pixels = confirm_visible(stacked(decoded))
        if job.outside is not None or job.encoding.format == "jpeg":
            work.pixels = on_white(work.pixels)  # neither keeps the alpha that was drawn
        if job.outside is not None:
            source, drawn = read_view(job.kept_view), Size(*work.pixels.shape[:2])
            work.reference, note = self._trips.of(source, drawn, model.round_trip, self._scope)
            work.warnings += [note] if note else []
        work.embeddings, work.latents = {}, None
        work.clock.enter("queue")
        yield work

    def drop(self) -> None:
        super().drop()
        self.tree.clear()

    def write(self, done: EditRequest, folder: JobFolder) -> Sequence[OutputFile]:
        """Write the layers first, if it has some: where its picture is, all of them are."""
        said = {"model_name": self._resident().card.name}
        layers = write_layers(done, folder, done.layers, self._config, **said)
        return (write_drawn(done, folder, self._config, **said), *layers)

    def line_fields(self, done: EditRequest) -> dict[str, Any]:
        reuse = None
        if branches := tuple(done.branches):
            is_shared = self._config.reuse.kv_reuse
            reason = "" if is_shared else "each job computes its own"
            reuse = ReuseReport("hit" if is_shared else "none", 0, 0, 0, branches, reason=reason)
        warnings, batch = [*edit_warnings(done.edit)], {"denoise": done.together}
        return {"warnings": warnings, "kv_reuse": reuse, "batch": batch}
