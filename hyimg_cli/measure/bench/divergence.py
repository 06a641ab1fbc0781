"""Differences between two observed runs of one job, stage by stage, with their likely cause.

A stage's input comes from the one before, so the first difference is the cause of the later ones.
"""

# Legend: H kv head, S slot, D head width
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isnan

import torch
from torch import Tensor

from hyimg_cli.measure.bench.observe import BranchSeen, JobSeen

# Sums in another order differ by less than this share of a layer's largest value; faults by more.
_GROSS = {torch.float32: 1e-3}
_GROSS_IN_HALF = 5e-2
_SHIFTS = (1, -1, 2, -2, 3, -3)
_MOST_NAMED = 6


# Stage, where in it, what differs; then how far, and whether by more than rounding does.
_Part = tuple[str, str, str] | tuple[str, str, str, float, bool]


@dataclass(frozen=True)
class Divergence:
    """One difference between variants. `is_fault`: more than rounding does; `is_structural`: what
    no rounding does, as other ids, another schedule, or tokens that one side cannot see.
    """

    custom_id: str
    stage: str
    where: str
    what: str
    max_abs: float = inf
    is_fault: bool = True

    @property
    def is_structural(self) -> bool:
        return self.max_abs == inf

    def __str__(self) -> str:
        return f"{self.custom_id}: {self.stage}, {self.where}: {self.what}"


def divergences(
    a: JobSeen, b: JobSeen, labels: tuple[str, str], *, is_lossy: bool = False
) -> list[Divergence]:
    """Every stage in which two observed runs differ, in the order of the stages; those behind the
    noise are left out where `is_lossy`: they are meant to.

    `labels` name the variants. Ids, tokens in the prefix, prefix K/V, what the denoise step can
    see, noise, schedule and guidance, velocity by step, latents by step.
    """
    parts = [*_text(a, b, labels)]
    for index, (one, other) in enumerate(zip(a.branches, b.branches, strict=False)):
        parts += _branch(f"branch {index}", one, other, labels)
    parts += _noise(a, b)
    if not is_lossy:
        parts += _schedule(a, b, labels)
        parts += _steps("velocity", a.velocities, b.velocities, _precision(b))
        parts += _steps("latents", a.latents[1:], b.latents[1:], _precision(b))
    return [Divergence(a.custom_id, *part) for part in parts]


def _text(a: JobSeen, b: JobSeen, labels: tuple[str, str]) -> Iterator[_Part]:
    if a.written != b.written:
        at = _first_unequal(a.written or (), b.written or ())
        yield "AR ids", f"token {at}", f"{labels[0]} and {labels[1]} wrote different text"
    if len(a.branches) != len(b.branches):
        what = f"{labels[0]} has {len(a.branches)}, {labels[1]} {len(b.branches)}"
        yield "branches", "count", what


def _branch(place: str, a: BranchSeen, b: BranchSeen, labels: tuple[str, str]) -> Iterator[_Part]:
    if a.ids != b.ids:
        at = _first_unequal(a.ids, b.ids)
        what = f"{labels[0]} has {_name(a, at)}, {labels[1]} {_name(b, at)}"
        yield "prefix ids", f"{place}, token {at}", what
        return
    if a.prefix_length != b.prefix_length:
        what = f"{labels[0]} holds {a.prefix_length} tokens, {labels[1]} {b.prefix_length}"
        yield "prefix length", place, what
        return
    yield from _key_values(place, a, b)
    for group, in_a, in_b in zip(a.groups, a.is_seen, b.is_seen, strict=True):
        if in_a != in_b:
            blind, other = labels if in_b else (labels[1], labels[0])
            where = f"{place}, {_tokens([*range(group.start, group.stop)])} ({group.name})"
            yield "visibility", where, f"hidden from every denoise step of {blind}, seen in {other}"


def _key_values(place: str, a: BranchSeen, b: BranchSeen) -> Iterator[_Part]:
    """The first layer at which prefix K/V differ; which tokens do so by more than rounding."""
    layers = [
        max(_apart(a.keys[layer], b.keys[layer]), _apart(a.values[layer], b.values[layer]))
        for layer in range(len(a.keys))
    ]
    # Written so that what is not a number counts as different.
    different = {layer: apart for layer, apart in enumerate(layers) if not apart <= 0}
    if not different:
        return
    largest = _largest(different.values())
    for layer in different:
        if tokens := _gross_tokens(a, b, layer):
            what = f"{largest:.1e} at {_named(tokens, a)}{_cause(a, b, layer, tokens)}"
            yield "prefix K/V", f"{place}, layer {layer}", what, largest, True
            return
    first, apart = next(iter(different.items()))
    what = f"{apart:.1e}, at most {largest:.1e} in any layer"
    yield "prefix K/V", f"{place}, layer {first}", what, largest, False


def _gross_tokens(a: BranchSeen, b: BranchSeen, layer: int) -> list[int]:
    """Tokens whose K or V of a layer differ by more than rounding."""
    is_gross = torch.zeros(a.prefix_length, dtype=torch.bool)
    for one, other in ((a.keys, b.keys), (a.values, b.values)):
        apart_S = (one[layer].float() - other[layer].float()).abs().amax(dim=(0, 2))
        # Not a number is a fault, too.
        is_gross |= ~(apart_S <= _gross(other[layer]))
    return [int(at) for at in is_gross.nonzero()[:, 0]]


def _cause(a: BranchSeen, b: BranchSeen, layer: int, tokens: Sequence[int]) -> str:
    """The kind of fault that the rows of `tokens` look like, in the first layer that shows it."""
    keys, values = (a.keys[layer], b.keys[layer]), (a.values[layer], b.values[layer])
    if _apart(*values) == 0 < _apart(*keys):
        return "; values agree, keys do not: rotary positions differ"
    for shift in _SHIFTS:
        if _agrees_when_moved(*values, shift):
            by = f"{abs(shift)} slot{'s' if abs(shift) > 1 else ''}"
            return f"; the rows stand {by} too {'early' if shift > 0 else 'late'}"
    is_empty = not any(bool(rows_HSD[:, tokens].any()) for rows_HSD in a.values)
    return "; the rows are empty" if is_empty else ""


def _agrees_when_moved(a_HSD: Tensor, b_HSD: Tensor, shift: int) -> bool:
    """True where most of `a`'s rows, if they differ, are those of `b` `shift` slots later."""
    length = a_HSD.shape[1] - abs(shift)
    if length < 2:
        return False
    ours, theirs = (a_HSD, b_HSD) if shift > 0 else (b_HSD, a_HSD)
    moved_S = (ours[:, :length] - theirs[:, abs(shift) :]).abs().amax(dim=(0, 2))
    still_S = (ours[:, :length] - theirs[:, :length]).abs().amax(dim=(0, 2))
    gross = _gross(b_HSD)
    differs = still_S > gross
    return bool(differs.any()) and float((moved_S[differs] <= gross).float().mean()) > 0.5


def _noise(a: JobSeen, b: JobSeen) -> Iterator[_Part]:
    if not (a.latents and b.latents):
        return
    if a.latents[0].shape != b.latents[0].shape:
        what = f"{list(a.latents[0].shape)} and {list(b.latents[0].shape)}"
        yield "latent size", "before step 1", what
    elif not (apart := _apart(a.latents[0], b.latents[0])) <= 0:
        what = f"{apart:.1e}: another seed, or another generator"
        yield "initial noise", "before step 1", what


def _schedule(a: JobSeen, b: JobSeen, labels: tuple[str, str]) -> Iterator[_Part]:
    if len(a.steps) != len(b.steps):
        what = f"{labels[0]} takes {len(a.steps)} steps, {labels[1]} {len(b.steps)}"
        yield "schedule", "step count", what
    elif a.steps != b.steps:
        at = _first_unequal(a.steps, b.steps)
        what = f"sigma {a.steps[at][0]:.6f} and {b.steps[at][0]:.6f}"
        yield "schedule", f"step {at + 1}", what
    if a.guidance != b.guidance:
        yield "guidance", "scale", f"{labels[0]} {a.guidance:g}, {labels[1]} {b.guidance:g}"


def _steps(
    stage: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], computed_in: torch.dtype | None
) -> Iterator[_Part]:
    """The first step at which a stage differs; latents of another size are told elsewhere."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a.shape == b.shape]
    apart_by_step = [_apart(a, b) for a, b in pairs]
    step = next((step for step, apart in enumerate(apart_by_step) if not apart <= 0), None)
    if step is not None:
        apart = apart_by_step[step]
        largest = _largest(apart_by_step)
        is_fault = not apart <= _gross(pairs[step][1], computed_in)
        what = f"{apart:.1e}, at most {largest:.1e} in any step"
        yield stage, f"step {step + 1}", what, largest, is_fault


def _gross(rows: Tensor, computed_in: torch.dtype | None = None) -> float:
    """The least difference that no rounding explains in such a tensor; its dtype by default."""
    share = _GROSS.get(computed_in or rows.dtype, _GROSS_IN_HALF)
    return share * float(rows.float().abs().max())


def _precision(job: JobSeen) -> torch.dtype | None:
    """The dtype that the network computes in: velocities are float32 whatever that is."""
    return job.branches[0].keys[0].dtype if job.branches else None


def _largest(values: Iterable[float]) -> float:
    """The largest; not a number where one is none."""
    found = list(values)
    return next((value for value in found if isnan(value)), max(found))


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference of any value."""
    return float((a.float() - b.float()).abs().max())


def _first_unequal(a: Sequence[object], b: Sequence[object]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(a), len(b)))


def _name(branch: BranchSeen, at: int) -> str:
    return branch.names[at] if at < len(branch.names) else "no token"


def _named(tokens: Sequence[int], branch: BranchSeen) -> str:
    """Some tokens by number and by what they stand for."""
    parts = []
    for group in branch.groups:
        inside = [at for at in tokens if group.start <= at < group.stop]
        if inside:
            parts.append(f"{_tokens(inside)} ({group.name})")
    more = len(parts) - _MOST_NAMED
    # The last ones open the picture: they tell most.
    return (f"{more} more, " if more > 0 else "") + ", ".join(parts[-_MOST_NAMED:])


def _tokens(at: Sequence[int]) -> str:
    return f"token {at[0]}" if len(at) == 1 else f"tokens {at[0]} to {at[-1]}"
