"""Pictures from editing models that denoise latents, one at a time or in batches.

A batch has jobs of one size and schedule whose encoded inputs have equal shapes. Its last bits
depend on the number of its rows, so jobs are only joined by request.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from hyimg_cli.cache.disk import SOURCE_IMAGES
from hyimg_cli.journal.edit_facts import edit_warnings
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.manifest.planner import group_by
from hyimg_cli.media.images import Pixels, on_white, read_view, stacked
from hyimg_cli.memory.available import joined_pictures
from hyimg_cli.models import registry
from hyimg_cli.pipelines.latent.pipeline import Events, LatentPipeline, LatentRequest
from hyimg_cli.pipelines.prefix_tree import new_prefix_tree
from hyimg_cli.pipelines.queue import Ticket, TicketQueue
from hyimg_cli.pipelines.request import confirm_visible, write_drawn, write_layers
from hyimg_cli.pipelines.round_trips import RoundTrips
from hyimg_cli.settings.run import ModelChoice, RunConfig
from hyimg_cli.spec.events import BranchTokens, OutputFile, Progress, ReuseReport
from hyimg_cli.spec.job import ImageJob, Size

if TYPE_CHECKING:
    from hyimg_cli.models.diffusers_image.model import BlockDenoiser, LatentImageModel


_ROUNDED = (
    "denoised together with other jobs: its last bits may differ from those of a job drawn alone"
)


@dataclass(eq=False)
class EditRequest(LatentRequest[ImageJob]):
    """A picture at work.

    `branches`: token counts of its branches. `layers`: what its `pixels` are the sum of, if it has
    layers.
    """

    branches: Sequence[BranchTokens] = ()
    layers: Sequence[Pixels] = ()


class EditPipeline(LatentPipeline["LatentImageModel", ImageJob, EditRequest]):
    """Draws and edits pictures, one at a time or in batches."""

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
        model = self._resident()
        if len(works) == 1:
            (work,) = works
            denoiser = model.denoiser(work.job, work.embeddings, self._scope)
            work.branches = denoiser.branches
            return denoiser
        for work in works:
            if _ROUNDED not in work.notes:
                work.input_notes = (*work.input_notes, _ROUNDED)
                work.notes.append(_ROUNDED)
        return model.denoiser_of([(work.job, work.embeddings) for work in works])

    def _take(self, queue: TicketQueue) -> list[Ticket]:
        """Take waiting jobs that may be denoised with the next one, too."""
        taken = super()._take(queue)
        if len(taken) != 1 or queue.is_whole or (key := self._key(taken[0])) is None:
            return taken
        names = {taken[0].job.custom_id}

        def is_alike(ticket: Ticket) -> bool:
            # The names of several callers' jobs may be equal; events are told apart by them.
            if ticket.job.custom_id in names or self._key(ticket) != key:
                return False
            names.add(ticket.job.custom_id)
            return True

        return taken + queue.take_alike(self._together(taken[0]) - 1, is_alike)

    def _parts(self, tickets: Sequence[Ticket]) -> Iterator[Sequence[Ticket]]:
        """Yield jobs that may be denoised together, as many as fit into memory by then."""
        for same in group_by(tickets, lambda ticket: self._key(ticket) or ticket).values():
            left = same
            while left:
                most = self._together(left[0])
                yield left[:most]
                left = left[most:]

    def _batches(self, works: Sequence[EditRequest]) -> Iterator[Sequence[EditRequest]]:
        """Yield jobs that continue after one step, and whose encoded inputs have equal shapes."""
        from hyimg_cli.models.diffusers_image.joined import form_of

        for same in group_by(works, lambda it: (it.first_step, form_of(it.embeddings))).values():
            left = same
            while left:  # a lack of memory in an earlier batch limits later ones
                yield left[: self._most]
                left = left[self._most :]

    def _key(self, ticket: Ticket) -> Hashable | None:
        """Return what tickets that are denoised together have in common; None for one alone."""
        if self._config.batch.is_invariant:
            return None
        own = self._resident().batch_key(cast(ImageJob, ticket.job))
        return None if own is None else (own, ticket.scope, ticket.is_online)

    def _together(self, ticket: Ticket) -> int:
        """Return how many jobs like this one may be denoised together now."""
        if self._key(ticket) is None:
            return 1
        return min(self._most, joined_pictures(cast(ImageJob, ticket.job), self.fitted))

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
