"""Guidance branches, each on the longest prefix that is there already.

    AR stage's context   s0 s1 .. [image] .. text .. tag        fed, committed
    positive branch      \\_______ forked ________/ rest computed
    negative branch      \\__ forked __/ <cfg> .. computed      (shares the system prompt and
    images)

What is forked is what the ids agree on, counted from the front; reuse is exact because a token's
K/V depend on nothing behind it. Recomputing starts every branch from an empty buffer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyimg_cli.engine.clock import PhaseClock
from hyimg_cli.errors import ReuseError
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.protocols import BranchLayout, Context, Encoded, MixedModel
from hyimg_cli.spec.events import BranchTokens, ReuseReport, ReuseStatus
from hyimg_cli.spec.run import ReuseConfig


@dataclass(frozen=True)
class Donor:
    """A committed prefix that a branch may start from."""

    ids: Sequence[int]
    buffer: Buffer
    is_ar_stage: bool

    def shared_with(self, ids: Sequence[int], limit: int) -> int:
        """Leading tokens in common, within what is committed and `limit`."""
        most = min(len(self.ids), len(ids), self.buffer.length, limit)
        pairs = zip(self.ids[:most], ids, strict=False)
        return next((index for index, (a, b) in enumerate(pairs) if a != b), most)


@dataclass(frozen=True)
class Branches:
    """Branches ready to denoise, the conditional one first, and what they were built from."""

    items: tuple[Any, ...]
    tokens: tuple[BranchTokens, ...]


def build_branches(
    model: MixedModel,
    layout: BranchLayout,
    sources: Sequence[Encoded],
    context: Context,
    *,
    has_negative: bool,
    reuse: ReuseConfig,
    clock: PhaseClock,
) -> Branches:
    """Both branches of `layout`, their prefixes complete up to the live rows."""
    donors = []
    if reuse.kv_reuse and context.buffer is not None:
        donors.append(Donor(context.ids, context.buffer, is_ar_stage=True))
    rows = [layout.ids, layout.unconditional_ids][: 1 + has_negative]
    items, tokens = [], []
    for ids in rows:
        clock.enter("kv_handoff")
        buffer, taken, is_from_ar = _started(model, layout, ids, donors)
        clock.enter("prefill")
        before = model.rows_seen
        model.prefill(layout, ids, sources, buffer)
        computed = model.rows_seen - before
        items.append(model.branch(layout, buffer))
        tokens.append(
            BranchTokens(
                reused=taken if is_from_ar else 0,
                shared=0 if is_from_ar else taken,
                computed=computed,
                per_step=layout.live_stop - layout.live_start,
            )
        )
        if reuse.kv_reuse:
            donors.append(Donor(ids[: layout.live_start], buffer, is_ar_stage=False))
    return Branches(tuple(items), tuple(tokens))


def _started(
    model: MixedModel, layout: BranchLayout, ids: Sequence[int], donors: Sequence[Donor]
) -> tuple[Buffer, int, bool]:
    """A buffer with the longest prefix that a donor has, its length, and whether it is the AR's."""
    limit = layout.live_start
    lengths = [donor.shared_with(ids, limit) for donor in donors]
    longest = max(lengths, default=0)
    if longest == 0:
        return model.new_buffer(layout.live_stop), 0, False
    donor = donors[lengths.index(longest)]
    return donor.buffer.fork(longest, layout.live_stop), longest, donor.is_ar_stage


def report(
    branches: Branches, context: Context, *, prefill_rows: int, decode_rows: int, reuse: ReuseConfig
) -> ReuseReport:
    """What the diffusion stage took over, in counted rows.

    Raises ReuseError where reuse is required and the status is not `hit`.
    """
    status, reason = _status(branches, context, reuse)
    if reuse.required and status != "hit":
        raise ReuseError(
            f"KV reuse is {status}: {reason}",
            hint="leave out --require-kv-reuse, or change what the reason names",
            code="reuse.not-hit",
        )
    return ReuseReport(status, prefill_rows, decode_rows, branches.tokens, reason)


def _status(branches: Branches, context: Context, reuse: ReuseConfig) -> tuple[ReuseStatus, str]:
    if not reuse.kv_reuse:
        return "recompute", "asked for"
    if context.buffer is None:
        return "none", "the job has no AR stage"
    reused, fed = branches.tokens[0].reused, len(context.ids)
    if reused == fed:
        return "hit", ""
    return "partial", f"the sequences differ from token {reused} of {fed} on"
