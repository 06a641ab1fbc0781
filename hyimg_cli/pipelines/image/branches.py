"""Guidance branches, each started from the longest prefix that already exists.

    AR stage's context   s0 s1 .. [image] .. text .. tag        fed, committed
    positive branch      \\_______ forked ________/ rest computed
    negative branch      \\__ forked __/ <cfg> .. computed      (shares the system prompt
                                                                and images)

If branches have ranks of their own, each one is started there, either from the context, which all
ranks have, or from that branch's part of the tree. Their prefills are one forward.

A fork shares the pages of the rows up to the first id that differs. Reuse is exact because a
token's K/V do not depend on later tokens. Without an AR stage, the tree of other jobs' prefixes is
used instead. Recomputing starts every branch from an empty buffer.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from hyimg_cli.errors import ReuseError
from hyimg_cli.kv.buffer import Buffer, Rows
from hyimg_cli.kv.returns import Returns
from hyimg_cli.kv.segments import Segment
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.protocols import BranchSequence, Canvas, Context, Encoded, Prefill
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.prefill import Prefilling
from hyimg_cli.settings.run import ReuseConfig
from hyimg_cli.spec.events import BranchTokens, ReuseReport, ReuseStatus
from hyimg_cli.spec.job import ImageJob


class Prefixes:
    """Prefixes shared between jobs: one model's part of the KV tree.

    With a budget of zero nothing is shared.
    """

    def __init__(
        self,
        tree: KVTree[Rows],
        scope: str,
        returns: Returns | None = None,
        names: Mapping[str, str] | None = None,
        used: list[tuple[str, Sequence[Segment]]] | None = None,
    ) -> None:
        """`returns`: what jobs that are left will look up; None if later jobs are unknown.

        `names`: the paths of a job's images, by digest; `used`: the sequences that it looked up.
        """
        self._tree, self._scope, self._returns = tree, scope, returns
        self._names, self._used = names or {}, [] if used is None else used

    def within(self, scope: object) -> "Prefixes":
        """Return the prefixes of one guidance branch or caller's scope, visible only in it."""
        inner = f"{self._scope} of {scope!r}"
        return Prefixes(self._tree, inner, self._returns, self._names, self._used)

    def of_job(self, names: Mapping[str, str]) -> "Prefixes":
        """Return the same for one job, which looks up sequences until its `end`."""
        return Prefixes(self._tree, self._scope, self._returns, names)

    def end(self, job: ImageJob) -> None:
        """Drop what no job that is left will look up, now that this one has ended."""
        if self._returns is None:
            return
        self._returns.end(job)
        for scope, segments in self._used:
            over = self._returns.over(segments, self._names)
            if over is not None:
                self._tree.trim(scope, *over)

    def held(self, segments: Sequence[Segment]) -> int:
        """Return the number of leading tokens of the segments that are held."""
        return self._tree.match(self._scope, segments).length

    def start(self, segments: Sequence[Segment], buffer: Buffer) -> int:
        """Fill the empty `buffer` with the longest held prefix; return its length in tokens."""
        assert buffer.length == 0, "a prefix stands at the front"
        self._used.append((self._scope, segments))
        match = self._tree.match(self._scope, segments)
        with self._tree.pinned(match) as prefix:
            for payload in prefix.payloads:
                buffer.extend(payload)
        return buffer.length

    def are_coming(self, segments: Sequence[Segment], known: int = 0) -> bool:
        """True if another job computes, to keep them, more leading tokens than are held.

        `known`: tokens that the job has from elsewhere; as many held ones are worth no waiting.
        """
        expects = self._tree.expects
        # The second look needs a search of the tree, and mostly nothing is computed.
        return expects(self._scope, segments, known) and expects(
            self._scope, segments, self.held(segments)
        )

    def computing(self, segments: Sequence[Segment]) -> AbstractContextManager[None]:
        """Let other jobs wait for the segments until the block ends; then `keep` them."""
        return self._tree.expecting(self._scope, self._returning(segments))

    def keep(
        self, segments: Sequence[Segment], buffer: Buffer, *, is_awaited: bool = False
    ) -> None:
        """Hold the segments' K/V, shared with the buffer in which they were computed.

        Of a sequence that is not known to be `is_awaited`, hold what other jobs may look up.
        """
        self._used.append((self._scope, segments))
        held = segments if is_awaited else self._returning(segments)
        self._tree.insert(self._scope, held, buffer.rows)

    def _returning(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        return segments if self._returns is None else self._returns.shared(segments, self._names)

    def release(self) -> None:
        """Drop everything to free memory; later jobs compute their prefixes again."""
        self._tree.clear()


@dataclass(frozen=True)
class PrefixSource:
    """A committed prefix that a branch may start from."""

    ids: Sequence[int]
    buffer: Buffer
    is_ar_stage: bool

    def shared_with(self, ids: Sequence[int], limit: int) -> int:
        """Return the number of leading tokens in common, at most `limit` and what is committed."""
        return _in_common(self.ids[: self.buffer.length], ids[:limit])


@dataclass(frozen=True)
class _Started:
    """A branch that starts with the longest existing prefix.

    `reused`: tokens from the AR stage; `shared`: tokens from elsewhere; `prefixes`: where the
    branch's own prefix may be kept.
    """

    own: BranchSequence
    buffer: Buffer
    reused: int
    shared: int
    prefixes: Prefixes | None

    @property
    def keeps(self) -> bool:
        """True if the branch's prefix is kept for other jobs."""
        return self.prefixes is not None and self.reused == 0


@dataclass
class BranchBuilder:
    """Builds one job's branches; each finished branch may give its prefix to the next.

    With `prefixes` None nothing is reused (recompute).
    """

    model: DecoderModel
    canvas: Canvas
    sources: Sequence[Encoded]
    prefixes: Prefixes | None
    clock: PhaseClock
    _known: list[PrefixSource] = field(default_factory=list)
    _segments: dict[BranchSequence, list[Any]] = field(default_factory=dict)

    def build(
        self, context: Context
    ) -> Prefilling[tuple[tuple[Any, ...], tuple[BranchTokens, ...]]]:
        """Return the branches, the conditional one first, and what each was built from.

        The prefixes of the branches are complete up to the live rows. Branches with equal ids are
        built once, because guidance between equal branches changes nothing.
        """
        if self.prefixes is not None and context.buffer is not None:
            self._known.append(PrefixSource(context.ids, context.buffer, is_ar_stage=True))
        sequences = list(dict.fromkeys(self.canvas.branches))
        if self.model.branch_sets > 1 and len(sequences) > 1:
            built = self._apart(sequences)
        else:
            built = yield from self._together(sequences)
        return tuple(branch for branch, _ in built), tuple(tokens for _, tokens in built)

    def _apart(self, sequences: Sequence[BranchSequence]) -> list[tuple[Any, BranchTokens]]:
        """Build branches on ranks of their own."""
        self.clock.enter("kv_handoff")
        started = []
        for number, own in enumerate(sequences):
            prefixes = self.prefixes and self.prefixes.within(number)
            buffer = self.model.new_branch_buffer(number)
            started.append(self._started(own, prefixes, buffer))
        self.clock.enter("prefill")
        lacking = [one.own.live_start - one.buffer.length for one in started]
        prefills = [self._prefill(one) for one in started]
        self.model.prefill_branches(prefills)
        is_exact = self.prefixes is not None and self.model.layer_devices[0].type == "cpu"
        if is_exact and self._withdrawn(started, lacking):
            self.model.prefill_branches(prefills)
        return [self._done(one, rows) for one, rows in zip(started, lacking, strict=True)]

    def _withdrawn(self, started: Sequence[_Started], lacking: Sequence[int]) -> bool:
        """Cut branches back to what they share with the first one, if that ends within a text.

        Return True if any branch was cut. A single process that reuses rows computes the remaining
        rows as a separate run. On a CPU the bits must match those of a single process; on other
        devices they depend on the batch anyway.
        """
        first = PrefixSource(started[0].own.ids, started[0].buffer, is_ar_stage=False)
        is_any = False
        for one, rows in zip(started[1:], lacking[1:], strict=True):
            own = one.own
            common = first.shared_with(own.ids, own.live_start)
            ends = accumulate(segment.length for segment in self._shareable(own))
            if own.live_start - rows < common < own.live_start and common not in ends:
                one.buffer.truncate(common)
                is_any = True
        return is_any

    def _together(
        self, sequences: Sequence[BranchSequence]
    ) -> Prefilling[list[tuple[Any, BranchTokens]]]:
        """Build branches in as few rounds as their common prefixes allow."""
        built: list[tuple[Any, BranchTokens]] = []
        left = deque(sequences)
        while left:
            self.clock.enter("kv_handoff")
            started: list[_Started] = []
            while left and not self._must_wait(left[0], started):
                started.append(self._started(left.popleft(), self.prefixes))
            self.clock.enter("prefill")
            rows = [one.own.live_start - one.buffer.length for one in started]
            lacking = [one for one, missing in zip(started, rows, strict=True) if missing]
            if lacking or not started:
                with ExitStack() as coming:
                    for one in lacking:
                        if one.prefixes is not None and one.keeps:
                            coming.enter_context(one.prefixes.computing(self._shareable(one.own)))
                    yield [self._prefill(one) for one in lacking]
            for one, missing in zip(started, rows, strict=True):
                if self.prefixes is not None:
                    prefix = one.own.ids[: one.own.live_start]
                    self._known.append(PrefixSource(prefix, one.buffer, is_ar_stage=False))
                built.append(self._done(one, missing))
        return built

    def _must_wait(self, own: BranchSequence, started: Sequence[_Started]) -> bool:
        """True if a branch that is being computed, of this job or another, has more to share."""
        if self.prefixes is None:
            return False
        known = max(self._shared_with_known(own), default=0)
        for one in started:
            if _in_common(one.own.ids[: one.own.live_start], own.ids[: own.live_start]) > known:
                return True
        return self.prefixes.are_coming(self._shareable(own), known)

    def _prefill(self, one: _Started) -> Prefill:
        return Prefill(one.own.layout, one.own.ids, self.sources, one.buffer, one.own.live_start)

    def _done(self, one: _Started, computed: int) -> tuple[Any, BranchTokens]:
        own = one.own
        if one.prefixes is not None and one.keeps:
            one.prefixes.keep(self._shareable(own), one.buffer)
        branch = self.model.branch(own.layout, one.buffer)
        per_step = own.live_stop - own.live_start
        return branch, BranchTokens(one.reused, one.shared, computed, per_step)

    def _shared_with_known(self, own: BranchSequence) -> list[int]:
        return [source.shared_with(own.ids, own.live_start) for source in self._known]

    def _started(
        self, own: BranchSequence, prefixes: Prefixes | None, empty: Buffer | None = None
    ) -> _Started:
        """Return a buffer with the longest existing prefix, using `empty` if given."""
        lengths = self._shared_with_known(own)
        longest = max(lengths, default=0)
        buffer = empty or self.model.new_buffer()
        if prefixes is not None:
            shareable = self._shareable(own)
            if prefixes.held(shareable) > longest:
                return _Started(own, buffer, 0, prefixes.start(shareable, buffer), prefixes)
        source = self._known[lengths.index(longest)] if longest else None
        reused = longest if source and source.is_ar_stage else 0
        if source:
            buffer.share_prefix(source.buffer, longest)
        return _Started(own, buffer, reused, longest - reused, prefixes)

    def _shareable(self, own: BranchSequence) -> list[Any]:
        """Return the prefix without its last token, as segments."""
        if own not in self._segments:
            stop = own.live_start - 1
            found = self.model.segments(own.layout, own.ids, self.sources, stop)
            self._segments[own] = found
        return self._segments[own]


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens in common."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def reuse_of(
    tokens: tuple[BranchTokens, ...], context: Context, *, of_text: ReuseReport, reuse: ReuseConfig
) -> ReuseReport:
    """Return the reuse by the diffusion stage, in counted rows.

    `of_text`: the report of the AR stage alone. Raises ReuseError if reuse is required and the
    status is not `hit`.
    """
    status: ReuseStatus = "hit"
    reason, reused, fed = "", tokens[0].reused, len(context.ids)
    if not reuse.kv_reuse:
        status, reason = "recompute", "asked for"
    elif context.buffer is None:
        status, reason = "none", "the job has no AR stage"
    elif reused != fed:
        status, reason = "partial", f"the sequences differ from token {reused} of {fed} on"
    if reuse.required and status != "hit":
        raise ReuseError(
            f"KV reuse is {status}: {reason}",
            hint="remove --require-kv-reuse, or change what the reason names",
            code="reuse.not-hit",
        )
    return replace(of_text, status=status, branches=tokens, reason=reason)
