"""Where two observed runs of one job part, stage by stage, and what the difference looks like.

A stage's input comes from the one before, so the first difference is the cause of the later ones.
"""

# Legend: H kv head, S slot, D head width
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from hyimg_cli.measure.bench.observe import BranchSeen, JobSeen

# Sums in another order differ by less than this share of a layer's largest value; faults by more.
_GROSS = {torch.float32: 1e-3}
_GROSS_IN_HALF = 5e-2
_SHIFTS = (1, -1, 2, -2, 3, -3)
_MOST_NAMED = 6


@dataclass(frozen=True)
class Divergence:
    """One difference between variants. `is_fault`: more than rounding does; `is_structural`: what
    no rounding does, as other ids, another schedule, or tokens that one side cannot see.
    """

    custom_id: str
    stage: str
    where: str
    what: str
    max_abs: float
    is_fault: bool

    @property
    def is_structural(self) -> bool:
        return self.max_abs == float("inf")

    def __str__(self) -> str:
        return f"{self.custom_id}: {self.stage}, {self.where}: {self.what}"


def divergences(a: JobSeen, b: JobSeen, labels: tuple[str, str]) -> list[Divergence]:
    """Every stage in which two observed runs differ, in the order of the stages.

    `labels` name the variants. Ids, tokens in the prefix, prefix K/V, what the denoise step can
    see, noise, schedule and guidance, velocity by step, latents by step.
    """
    found = [*_texts(a, b, labels), *_branch_counts(a, b, labels)]
    for index, (one, other) in enumerate(zip(a.branches, b.branches, strict=False)):
        found += _branch(a.custom_id, index, one, other, labels)
    return [*found, *_noise(a, b), *_schedule(a, b, labels), *_steps(a, b)]


def _texts(a: JobSeen, b: JobSeen, labels: tuple[str, str]) -> Iterator[Divergence]:
    if a.written != b.written:
        at = _first_unequal(a.written or (), b.written or ())
        what = f"{labels[0]} and {labels[1]} wrote different text"
        yield Divergence(a.custom_id, "AR ids", f"token {at}", what, float("inf"), True)


def _branch_counts(a: JobSeen, b: JobSeen, labels: tuple[str, str]) -> Iterator[Divergence]:
    counts = len(a.branches), len(b.branches)
    if counts[0] != counts[1]:
        what = f"{labels[0]} has {counts[0]}, {labels[1]} {counts[1]}"
        yield Divergence(a.custom_id, "branches", "count", what, float("inf"), True)


def _branch(
    job: str, index: int, a: BranchSeen, b: BranchSeen, labels: tuple[str, str]
) -> Iterator[Divergence]:
    place = f"branch {index}"
    if a.ids != b.ids:
        at = _first_unequal(a.ids, b.ids)
        what = f"{labels[0]} has {_name(a, at)}, {labels[1]} {_name(b, at)}"
        yield Divergence(job, "prefix ids", f"{place}, token {at}", what, float("inf"), True)
        return
    if a.prefix_length != b.prefix_length:
        what = f"{labels[0]} holds {a.prefix_length} tokens, {labels[1]} {b.prefix_length}"
        yield Divergence(job, "prefix length", place, what, float("inf"), True)
        return
    yield from _key_values(job, place, a, b)
    for group, in_a, in_b in zip(a.groups, a.is_seen, b.is_seen, strict=True):
        if in_a != in_b:
            blind, other = labels if in_b else (labels[1], labels[0])
            what = f"hidden from every denoise step of {blind}, seen in {other}"
            where = f"{place}, {_tokens([*range(group.start, group.stop)])} ({group.name})"
            yield Divergence(job, "visibility", where, what, float("inf"), True)


def _key_values(job: str, place: str, a: BranchSeen, b: BranchSeen) -> Iterator[Divergence]:
    """The first layer at which prefix K/V differ; which tokens do so by more than rounding."""
    layers = [
        (layer, max(_apart(a.keys[layer], b.keys[layer]), _apart(a.values[layer], b.values[layer])))
        for layer in range(len(a.keys))
    ]
    # Written so that what is not a number counts as different.
    different = [(layer, apart) for layer, apart in layers if not apart <= 0]
    if not different:
        return
    largest = _largest(apart for _, apart in different)
    tokens_of = {layer: _gross_tokens(a, b, layer) for layer, _ in different}
    layer = next((layer for layer, tokens in tokens_of.items() if tokens), None)
    if layer is None:
        first, apart = different[0]
        what = f"{apart:.1e}, at most {largest:.1e} in any layer"
        yield Divergence(job, "prefix K/V", f"{place}, layer {first}", what, largest, False)
        return
    tokens = tokens_of[layer]
    what = f"{largest:.1e} at {_named(tokens, a)}{_cause(a, b, layer, tokens)}"
    yield Divergence(job, "prefix K/V", f"{place}, layer {layer}", what, largest, True)


def _gross_tokens(a: BranchSeen, b: BranchSeen, layer: int) -> list[int]:
    """Tokens whose K or V of a layer differ by more than rounding."""
    is_gross = torch.zeros(a.prefix_length, dtype=torch.bool)
    for one, other in ((a.keys, b.keys), (a.values, b.values)):
        apart_S = (one[layer].float() - other[layer].float()).abs().amax(dim=(0, 2))
        # Not a number is a fault, too.
        is_gross |= ~(apart_S <= _gross(other[layer]))
    return [int(at) for at in is_gross.nonzero()[:, 0]]


def _cause(a: BranchSeen, b: BranchSeen, layer: int, tokens: Sequence[int]) -> str:
    """What kind of fault the rows of `tokens` look like, in the first layer that shows it."""
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
    """Whether most of `a`'s rows are those of `b` `shift` slots later, where they differ."""
    length = a_HSD.shape[1] - abs(shift)
    if length < 2:
        return False
    ours, theirs = (a_HSD, b_HSD) if shift > 0 else (b_HSD, a_HSD)
    moved_S = (ours[:, :length] - theirs[:, abs(shift) :]).abs().amax(dim=(0, 2))
    still_S = (ours[:, :length] - theirs[:, :length]).abs().amax(dim=(0, 2))
    gross = _gross(b_HSD)
    differs = still_S > gross
    return bool(differs.any()) and float((moved_S[differs] <= gross).float().mean()) > 0.5


def _noise(a: JobSeen, b: JobSeen) -> Iterator[Divergence]:
    if not (a.latents and b.latents):
        return
    if a.latents[0].shape != b.latents[0].shape:
        what = f"{list(a.latents[0].shape)} and {list(b.latents[0].shape)}"
        yield Divergence(a.custom_id, "latent size", "before step 1", what, float("inf"), True)
    elif not (apart := _apart(a.latents[0], b.latents[0])) <= 0:
        what = f"{apart:.1e}: another seed, or another generator"
        yield Divergence(a.custom_id, "initial noise", "before step 1", what, float("inf"), True)


def _schedule(a: JobSeen, b: JobSeen, labels: tuple[str, str]) -> Iterator[Divergence]:
    if len(a.steps) != len(b.steps):
        what = f"{labels[0]} takes {len(a.steps)} steps, {labels[1]} {len(b.steps)}"
        yield Divergence(a.custom_id, "schedule", "step count", what, float("inf"), True)
    elif a.steps != b.steps:
        at = _first_unequal(a.steps, b.steps)
        what = f"sigma {a.steps[at][0]:.6f} and {b.steps[at][0]:.6f}"
        yield Divergence(a.custom_id, "schedule", f"step {at + 1}", what, float("inf"), True)
    if a.guidance != b.guidance:
        what = f"{labels[0]} {a.guidance:g}, {labels[1]} {b.guidance:g}"
        yield Divergence(a.custom_id, "guidance", "scale", what, float("inf"), True)


def _steps(a: JobSeen, b: JobSeen) -> Iterator[Divergence]:
    """The first step whose velocity differs, and the first whose latents do."""
    for stage, ours, theirs in (
        ("velocity", a.velocities, b.velocities),
        ("latents", a.latents[1:], b.latents[1:]),
    ):
        for step, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
            if one.shape != other.shape:
                break
            apart = _apart(one, other)
            if not apart <= 0:
                largest = _largest(
                    _apart(x, y) for x, y in zip(ours, theirs, strict=False) if x.shape == y.shape
                )
                is_fault = not apart <= _gross(other, _precision(b))
                what = f"{apart:.1e}, at most {largest:.1e} in any step"
                yield Divergence(a.custom_id, stage, f"step {step}", what, largest, is_fault)
                break


def _gross(rows: Tensor, computed_in: torch.dtype | None = None) -> float:
    """What no rounding explains in a tensor like this one; by default its own dtype counts."""
    share = _GROSS.get(computed_in or rows.dtype, _GROSS_IN_HALF)
    return share * float(rows.float().abs().max())


def _precision(job: JobSeen) -> torch.dtype | None:
    """What the network computes in: velocities are float32 whatever that is."""
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
