"""A model that is looked through while it works: what its branches hold, see and answer.

    Observed(model)  ids of each branch ▸ prefix K/V ▸ noise ▸ schedule ▸ velocity of each step
    Decided(model)   the same model, with the text of each job decided beforehand

Both stand between session and model and pass everything on; no part of the engine knows of them.
Looking costs time: a run that is observed is never timed.
"""

# Legend: H kv head, S slot, D head width, G branch, C channel, Y X latent rows and columns
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.kv.segments import ImageSegment
from hyimg_cli.models.protocols import (
    BranchSequence,
    Canvas,
    Context,
    Encoded,
    GeneratedText,
    LivePicture,
    MixedModel,
)
from hyimg_cli.spec.job import ImageJob

_MOST_GROUPS = 96
_NUDGE_SEED = 20


@dataclass(frozen=True)
class TokenGroup:
    """Prefix tokens `[start, stop)` that are seen or not seen as one: an image, a special token,
    a stretch of text.
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class BranchSeen:
    """One guidance branch as its first denoise step found it.

    `keys`, `values`: every layer's prefix [H, S, D] on the CPU. `is_seen`: for each group, whether
    the velocity changes when the group's values do.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    groups: tuple[TokenGroup, ...]
    is_seen: tuple[bool, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def prefix_length(self) -> int:
        return self.keys[0].shape[1]


@dataclass
class JobSeen:
    """One job's diffusion stage. `steps`: (sigma, next sigma, timestep) of each denoise step;
    `velocities` [G, C, Y, X] and `latents` [C, Y, X] entering each.
    """

    custom_id: str
    written: tuple[int, ...] | None = None
    guidance: float = 0.0
    branches: list[BranchSeen] = field(default_factory=list)
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)
    velocities: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class _Opened:
    """A canvas on its way to branches, and what is seen of them."""

    canvas: Canvas
    sources: Sequence[Encoded]
    seen: JobSeen
    buffers: list[Buffer] = field(default_factory=list)


class Passing:
    """A model behind a model: whatever is not named here is the inner one's."""

    def __init__(self, inner: MixedModel) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Decided(Passing):
    """A model whose text is decided: logits are computed, then all but the decided token's drop.

    `texts` holds, by job, the ids that follow its AR prompt. Where they end, and for a job without
    any, the model writes as it likes.
    """

    def __init__(self, inner: MixedModel, texts: Mapping[str, Sequence[int]]) -> None:
        super().__init__(inner)
        self._texts = texts
        self._started: dict[int, tuple[Context, Sequence[int], int]] = {}

    def text_budget(self, job: ImageJob, context: Context) -> int:
        ids = self._texts.get(job.custom_id, ())
        self._started[id(context)] = context, ids, len(context.ids)
        return self._inner.text_budget(job, context)

    def text_logits(self, contexts: Sequence[Context]) -> Tensor:
        logits_RV = self._inner.text_logits(contexts)
        for row, context in enumerate(contexts):
            _, ids, start = self._started.get(id(context), (context, (), 0))
            # Rows are counted in the buffer: ids that were just chosen may not be known here yet.
            at = (context.buffer.length if context.buffer else 0) - start
            if at < len(ids):
                decided = logits_RV[row, ids[at]].clone()
                logits_RV[row] = -torch.inf
                logits_RV[row, ids[at]] = decided
        return logits_RV


class Observed(Passing):
    """A model that is looked through; `jobs` fills while it works.

    `tries_tokens` off leaves out what takes longest: which tokens a denoise step can see.
    """

    # A branch's rows are looked at, and changed, in a buffer of its own.
    lends_prefixes = False

    def __init__(self, inner: MixedModel, *, tries_tokens: bool = True) -> None:
        super().__init__(inner)
        self._tries_tokens = tries_tokens
        self.jobs: dict[str, JobSeen] = {}
        self._contexts: dict[str, tuple[Context, int]] = {}
        self._layouts: dict[int, _Opened] = {}
        self._branches: dict[int, tuple[Any, _Opened, int]] = {}

    def texts(self) -> dict[str, tuple[int, ...]]:
        """By job, what follows its AR prompt: what was fed, and the choice that came last.

        For `Decided`. The last choice is never fed; it stands in the picture's sequence wherever
        that goes on from the fed one.
        """
        found = {}
        for name, (context, start) in self._contexts.items():
            fed, seen = tuple(context.ids), self.jobs.get(name)
            drawn = seen.branches[0].ids if seen and seen.branches else ()
            found[name] = (drawn if drawn[: len(fed)] == fed else fed)[start:]
        return found

    def text_budget(self, job: ImageJob, context: Context) -> int:
        self._contexts[job.custom_id] = context, len(context.ids)
        return self._inner.text_budget(job, context)

    def canvas(self, job: ImageJob, sources: Sequence[Encoded], text: GeneratedText) -> Canvas:
        canvas = self._inner.canvas(job, sources, text)
        seen = self.jobs[job.custom_id] = JobSeen(job.custom_id, text.ids)
        opened = _Opened(canvas, sources, seen)
        self._layouts |= {id(canvas.layout_of(own)): opened for own in canvas.branches}
        return canvas

    def branch(self, layout: Any, buffer: Buffer) -> Any:
        branch = self._inner.branch(layout, buffer)
        opened = self._layouts[id(layout)]
        self._branches[id(branch)] = branch, opened, len(opened.buffers)
        opened.buffers.append(buffer)
        return branch

    def velocities(self, pictures: Sequence[LivePicture]) -> list[Tensor]:
        answers = self._inner.velocities(pictures)
        for picture, velocity_GCYX in zip(pictures, answers, strict=True):
            self._see(picture, velocity_GCYX)
        return answers

    def _see(self, picture: LivePicture, velocity_GCYX: Tensor) -> None:
        _, opened, _ = self._branches[id(picture.branches[0])]
        seen = opened.seen
        if not seen.branches:
            seen.guidance = picture.guidance
            count = len(picture.branches)
            seen.branches = [self._branch_seen(picture, index) for index in range(count)]
        step = picture.step
        seen.steps.append((step.sigma, step.next_sigma, step.timestep))
        seen.latents.append(picture.latents_CYX.cpu().clone())
        seen.velocities.append(velocity_GCYX.cpu().clone())

    def _branch_seen(self, picture: LivePicture, index: int) -> BranchSeen:
        _, opened, number = self._branches[id(picture.branches[index])]
        own, buffer = opened.canvas.branches[number], opened.buffers[number]
        stop, ids = own.live_start, own.ids[: own.live_start]
        names = tuple(self._inner.decode_text([id_]) for id_ in ids)
        groups = self._groups(opened, own, names)
        prefix = buffer.cut(0, stop).on([torch.device("cpu")] * len(buffer.keys_HSD))
        is_seen: tuple[bool, ...] = ()
        if self._tries_tokens:
            before = self._inner.velocities([picture])[0][index].clone()
            is_seen = tuple(self._is_seen(picture, index, buffer, g, before) for g in groups)
        return BranchSeen(ids, names, groups, is_seen, prefix.keys, prefix.values)

    def _groups(
        self, opened: _Opened, own: BranchSequence, names: Sequence[str]
    ) -> tuple[TokenGroup, ...]:
        groups: list[TokenGroup] = []
        start = image = 0
        layout, end = opened.canvas.layout_of(own), own.live_start
        for segment in self._inner.segments(layout, own.ids[:end], opened.sources, end):
            stop = start + segment.length
            if isinstance(segment, ImageSegment):
                image += 1
                groups.append(TokenGroup(f"source image {image}", start, stop))
            else:
                groups += _text_groups(names, start, stop)
            start = stop
        return tuple(groups) if len(groups) <= _MOST_GROUPS else _joined(groups)

    def _is_seen(
        self, picture: LivePicture, index: int, buffer: Buffer, group: TokenGroup, before: Tensor
    ) -> bool:
        """True where a denoise step answers other than `before` once the group's values are others.

        Attention gives every visible token a weight, so only a hidden group leaves no trace.
        """
        kept = [rows_HSD[:, group.start : group.stop].clone() for rows_HSD in buffer.values_HSD]
        generator = torch.Generator().manual_seed(_NUDGE_SEED)
        for rows_HSD, own_HSD in zip(buffer.values_HSD, kept, strict=True):
            noise = torch.randn(own_HSD.shape, generator=generator).to(own_HSD)
            rows_HSD[:, group.start : group.stop] = own_HSD + noise
        after = self._inner.velocities([picture])[0][index]
        for rows_HSD, own_HSD in zip(buffer.values_HSD, kept, strict=True):
            rows_HSD[:, group.start : group.stop] = own_HSD
        return not torch.equal(before, after)


def _text_groups(names: Sequence[str], start: int, stop: int) -> list[TokenGroup]:
    """Stretches of plain text, and each special token by itself."""
    groups: list[TokenGroup] = []
    for at in range(start, stop):
        is_special = names[at].startswith("<") and names[at].endswith(">")
        last = groups[-1] if groups else None
        if is_special or last is None or last.name != "text":
            groups.append(TokenGroup(names[at] if is_special else "text", at, at + 1))
        else:
            groups[-1] = TokenGroup("text", last.start, at + 1)
    return groups


def _joined(groups: Sequence[TokenGroup]) -> tuple[TokenGroup, ...]:
    """Too many to try one by one: neighbours together, the last ones, which open the picture,
    apart.
    """
    head, tail = groups[: -_MOST_GROUPS // 2], groups[-_MOST_GROUPS // 2 :]
    width = -(-len(head) // (_MOST_GROUPS // 2))
    parts = [head[at : at + width] for at in range(0, len(head), width)]
    return (
        *(TokenGroup(f"{p[0].name} … {p[-1].name}", p[0].start, p[-1].stop) for p in parts),
        *tail,
    )
