"""Faults planted below the bench, in the engine of one variant alone. The bench does not know of
them.

`Buffer.share_prefix` is only called where a branch starts from K/V that are there
already: the reuse path.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import sleep
from typing import Any

import pytest
import torch
from kv_rows import change as change_rows
from kv_rows import sides

from hyimg_cli.diffusion.denoise import DenoiseState
from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.kv.arena import Span
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.kv.segments import ImageSegment
from hyimg_cli.measure.bench import runs
from hyimg_cli.measure.bench.runs import Uncached
from hyimg_cli.models.common.attention import QueryBlock
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.models.hunyuan_image3.model import Branch
from hyimg_cli.pipelines.image import batch
from hyimg_cli.pipelines.image.branches import BranchBuilder
from hyimg_cli.pipelines.image.sources import EncodedSources
from hyimg_cli.pipelines.image.stages import ImageStages
from hyimg_cli.pipelines.latent.encodings import Encodings
from hyimg_cli.spec import digest

Plant = Callable[[pytest.MonkeyPatch], None]


def hide_three_specials(patch: pytest.MonkeyPatch) -> None:
    """A denoise step of a forked branch passes over the last three tokens of its prefix."""
    _mark_forks(patch, lambda branch, layout: [(layout.live_start - 3, layout.live_start)])


def drop_source_image(patch: pytest.MonkeyPatch) -> None:
    """A denoise step of a forked branch passes over the source images."""
    _mark_forks(patch, lambda branch, layout: [(one.start, one.stop) for one in layout.sources])


def empty_source_image(patch: pytest.MonkeyPatch) -> None:
    """The hand-off leaves a source image's rows empty."""
    original = HunyuanImage3.branch

    def branch(self: Any, layout: Any, buffer: Any) -> Any:
        if getattr(buffer, "is_forked", False):
            for one in layout.sources:
                change_rows(buffer, one.start, one.stop, torch.zeros_like)
        return original(self, layout, buffer)

    _flag_forks(patch)
    patch.setattr(HunyuanImage3, "branch", branch)


def shift_negative_branch(patch: pytest.MonkeyPatch) -> None:
    """The negative branch takes over rows that stand one slot too late."""
    original = Buffer.share_prefix

    def share_prefix(self: Buffer, other: Buffer, prefix: int) -> None:
        original(self, other, prefix)
        if prefix < other.length:
            change_rows(self, 0, prefix, lambda rows: torch.cat([rows[:1], rows[:-1]]))

    patch.setattr(Buffer, "share_prefix", share_prefix)


def sleep_in_recompute(patch: pytest.MonkeyPatch) -> None:
    """The baseline waits where K/V would be received: a phase in which a gain is expected."""
    original = BranchBuilder._started

    def started(self: Any, *arguments: Any) -> Any:
        if self.prefixes is None:
            sleep(0.15)
        return original(self, *arguments)

    patch.setattr(BranchBuilder, "_started", started)


def sleep_in_decoding(patch: pytest.MonkeyPatch) -> None:
    """The reusing variant waits before it decodes: a phase that is the same in both."""
    original = ImageStages.decode

    def finished(studio: Any, work: Any) -> Any:
        if not studio.reuse.kv_reuse:
            work.clock.enter("decode_latents")
            sleep(0.3)
        return original(studio, work)

    patch.setattr(ImageStages, "decode", finished)


def one_step_less(patch: pytest.MonkeyPatch) -> None:
    """The reusing variant saves time by taking a step less."""

    def shorter(plan: Any) -> Any:
        return replace(plan, schedule=Schedule(plan.schedule.count - 1, plan.schedule.shift))

    _change_denoise_plan(patch, shorter)


def other_noise(patch: pytest.MonkeyPatch) -> None:
    """The reusing variant starts from other noise."""

    def moved(plan: Any) -> Any:
        return replace(plan, noise_CYX=plan.noise_CYX.roll(1, dims=-1))

    _change_denoise_plan(patch, moved)


def rounded_hand_off(patch: pytest.MonkeyPatch) -> None:
    """K/V pass through bfloat16 on their way from the AR stage."""
    original = Buffer.share_prefix

    def share_prefix(self: Buffer, other: Buffer, prefix: int) -> None:
        original(self, other, prefix)
        change_rows(self, 0, prefix, lambda rows: rows.to(torch.bfloat16).to(rows.dtype))

    patch.setattr(Buffer, "share_prefix", share_prefix)


def broken_hand_off(patch: pytest.MonkeyPatch) -> None:
    """Some of the K/V that are taken over are no numbers."""
    original = Buffer.share_prefix

    def share_prefix(self: Buffer, other: Buffer, prefix: int) -> None:
        original(self, other, prefix)
        change_rows(self, prefix - 1, prefix, lambda _: torch.nan, "v")

    patch.setattr(Buffer, "share_prefix", share_prefix)


def silent_recompute(patch: pytest.MonkeyPatch) -> None:
    """The reusing variant computes everything again and tells nobody."""
    original = BranchBuilder.build

    def build(self: Any, context: Any) -> Any:
        self.prefixes = None
        return original(self, context)

    patch.setattr(BranchBuilder, "build", build)


def forget_source_in_key(patch: pytest.MonkeyPatch) -> None:
    """The key of a shared prefix says that there is a source image, and not which."""
    # A key is kept with its segment: asked for now, it is made anew.
    patch.setattr(ImageSegment, "key", property(lambda self: f"image {self.grids} {self.ids}"))


def one_token_negative(patch: pytest.MonkeyPatch) -> None:
    """The negative branch denoises on a prefix of one token, as an empty companion prompt has."""
    _mark_forks(patch, lambda branch, layout: [(1, layout.live_start)] * _is_negative(branch))


def pad_negative_branch(patch: pytest.MonkeyPatch) -> None:
    """The end of the negative branch's prefix is padding: zeros that every row sees."""
    original = HunyuanImage3.branch

    def branch(self: Any, layout: Any, buffer: Any) -> Any:
        made = original(self, layout, buffer)
        if _is_negative(made):
            change_rows(buffer, layout.live_start - 8, layout.live_start, torch.zeros_like)
            made = original(self, layout, buffer)
        return made

    _flag_forks(patch)
    patch.setattr(HunyuanImage3, "branch", branch)


def _is_negative(branch: Any) -> bool:
    """True for a branch that took a part of the positive one's prefix, not all of it."""
    return getattr(branch.buffer, "is_partial", False)


def one_guidance_for_a_batch(patch: pytest.MonkeyPatch) -> None:
    """Every job of a batch is drawn with the first one's guidance."""
    original = batch.denoise_step

    def denoise_step(states: Any, velocities: Any) -> None:
        for one in states:
            one.plan = replace(one.plan, guidance=states[0].plan.guidance)
        original(states, velocities)

    patch.setattr(batch, "denoise_step", denoise_step)


def one_source_for_a_batch(patch: pytest.MonkeyPatch) -> None:
    """Every picture of a batch that has as many branches is drawn on the first one's."""
    original = HunyuanImage3.velocities

    def velocities(self: Any, pictures: Any) -> Any:
        first = pictures[0].branches
        same = [
            replace(one, branches=first) if len(one.branches) == len(first) else one
            for one in pictures
        ]
        return original(self, same)

    patch.setattr(HunyuanImage3, "velocities", velocities)


# What leaks lives as long as a process; see `simulate_processes`.
_LEAKED: dict[Any, Any] = {}


def keep_generator_of_a_seed(patch: pytest.MonkeyPatch) -> None:
    """A process keeps each seed's generator: a second job of that seed goes on where it was."""
    original, randn = HunyuanImage3.initial_latents, torch.randn

    def initial_latents(self: Any, bucket: Any, seed: int) -> Any:
        kept = _LEAKED.setdefault(seed, torch.Generator().manual_seed(seed))
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                torch,
                "randn",
                lambda *shape, generator, **kind: randn(*shape, generator=kept, **kind),
            )
            return original(self, bucket, seed)

    patch.setattr(HunyuanImage3, "initial_latents", initial_latents)


def add_seed_of_last_job(patch: pytest.MonkeyPatch) -> None:
    """A job's noise depends on the seed of the job before it in the same process."""
    original = HunyuanImage3.initial_latents

    def initial_latents(self: Any, bucket: Any, seed: int) -> Any:
        before, _LEAKED["seed"] = _LEAKED.get("seed", 0), seed
        return original(self, bucket, seed + before)

    patch.setattr(HunyuanImage3, "initial_latents", initial_latents)


def key_source_by_size(patch: pytest.MonkeyPatch) -> None:
    """The cache of encoded pictures takes pictures of one size for the same."""
    original = EncodedSources._encoding

    def encoding(self: Any, image: Any) -> Any:
        by_size = original(self, replace(image, digest=str(image.pixels.shape)))
        return replace(original(self, image), key=by_size.key)

    patch.setattr(EncodedSources, "_encoding", encoding)


def key_prompt_by_its_beginning(patch: pytest.MonkeyPatch) -> None:
    """The cache of embedded prompts takes prompts that begin alike for the same."""
    original = Encodings._encoding

    def encoding(self: Any, encoder: Any, item: Any) -> Any:
        return replace(original(self, encoder, item), key=digest.of_json(str(item)[:8]))

    patch.setattr(Encodings, "_encoding", encoding)


def simulate_processes(patch: pytest.MonkeyPatch) -> None:
    """The bench's processes are this one, emptied of what has leaked: starting any takes long."""

    class Pool:
        def __init__(self, *_: Any) -> None:
            _LEAKED.clear()

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: Any) -> None: ...

        def submit(self, call: Callable[..., Any], *arguments: Any) -> Any:
            done: Future[Any] = Future()
            done.set_result(call(*arguments))
            return done

    patch.setattr(runs, "ProcessPoolExecutor", Pool)


Rows = list[torch.Tensor]


def stale_cache(before: Rows, rows: Rows) -> Rows:
    """The last rows of a prefix are still those of the branch built before it."""
    for old, new in zip(before, rows, strict=True):
        new[-8:] = old[-8:]
    return rows


def shifted_position(before: Rows, rows: Rows) -> Rows:
    """A prefix is one slot too late."""
    for new in rows:
        new[1:] = new[:-1].clone()
    return rows


def wrong_branch(before: Rows, rows: Rows) -> Rows:
    """A branch denoises on the prefix of the one built before it."""
    for old, new in zip(before, rows, strict=True):
        shared = min(len(old), len(new))
        new[:shared] = old[:shared]
    return rows


def spoil_prefixes(
    patch: pytest.MonkeyPatch, variant: str, change: Callable[[Rows, Rows], Rows]
) -> None:
    """Change the prefix of every branch of one variant of kv-reuse, by its label, when it is made:
    once for all denoise steps, or, where none keeps it, at each.
    """
    build_of, branch_of = BranchBuilder.build, HunyuanImage3.branch
    now, before = "", Rows()

    def build(self: Any, context: Any) -> Any:
        nonlocal now
        is_uncached = isinstance(self.model._inner._inner, Uncached)
        plain = "recompute every step" if is_uncached else "recompute once"
        now = plain if self.prefixes is None else "reuse"
        return build_of(self, context)

    def branch(self: Any, layout: Any, buffer: Any) -> Any:
        nonlocal before
        if now == variant:
            kept = [*sides(buffer)]
            changed = iter(change(before or kept, [each.clone() for each in kept]))
            change_rows(buffer, 0, buffer.length, lambda _: next(changed))
            before = kept
        return branch_of(self, layout, buffer)

    patch.setattr(BranchBuilder, "build", build)
    patch.setattr(HunyuanImage3, "branch", branch)


def _flag_forks(patch: pytest.MonkeyPatch) -> None:
    original = Buffer.share_prefix

    def share_prefix(self: Any, other: Buffer, prefix: int) -> None:
        original(self, other, prefix)
        self.is_forked, self.is_partial = True, prefix < other.length

    patch.setattr(Buffer, "share_prefix", share_prefix)


@dataclass(frozen=True)
class _Blind(Branch):
    """A branch whose steps pass over some slots."""

    prefix: Span

    @property
    def query_block(self) -> QueryBlock:
        return QueryBlock(self.spans, self.buffer.arena.storage, self.prefix, None, self.buffer)


def _mark_forks(
    patch: pytest.MonkeyPatch, spans_of: Callable[[Any, Any], list[tuple[int, int]]]
) -> None:
    """Forked buffers hide some slots from every denoise step, and from nothing else."""
    branch_of = HunyuanImage3.branch

    def branch(self: Any, layout: Any, buffer: Any) -> Any:
        made = branch_of(self, layout, buffer)
        if not getattr(buffer, "is_forked", False):
            return made
        prefix, at = Span([]), 0
        for start, end in [*sorted(spans_of(made, layout)), (buffer.length, buffer.length)]:
            prefix, at = prefix + buffer.span(at, max(at, start)), max(at, end)
        hidden = buffer.length - sum(stop - start for start, stop in prefix.runs)
        spans = [replace(s, start=s.start - hidden, stop=s.stop - hidden) for s in made.spans]
        return _Blind(made.target, made.live_rope_2TD, spans, buffer, prefix)

    _flag_forks(patch)
    patch.setattr(HunyuanImage3, "branch", branch)


def _change_denoise_plan(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    original = ImageStages.build_branches

    def build(studio: Any, work: Any) -> Any:
        yield from original(studio, work)
        if studio.reuse.kv_reuse:
            work.denoise_plan = change(work.denoise_plan)
            work.denoise_state = DenoiseState(work.denoise_plan, work.job.step_cache)

    patch.setattr(ImageStages, "build_branches", build)
