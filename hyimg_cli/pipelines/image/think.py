"""The AR stage: text, token by token, for any number of jobs at once.

    step k      feed what step k-1 chose ─▶ logits ─▶ choose ─▶ ids, on the device all the way
    meanwhile   the ids of step k-1 reach the host, which checks them against the script

On a GPU a step's ids are read once the next step is on its way. A text that turns out to have
ended, or to go on with forced tokens, has then decoded one row too many: that row is taken back out
of the buffer, its draw is drawn again, and it is counted apart. On a CPU ids are there at once and
nothing is decoded in vain; ids and draws are the same either way.

A finished text is kept for jobs that would write the same one: one decode, n drawings. Its key is
its job's inputs and the bytes of its sources. Its ids are kept here; its K/V are in the tree of
prefixes, after its prompt's, as long as they fit.
"""

# Legend: V vocabulary, R row (a job that writes)
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.cache.memo import Memo
from hyimg_cli.kernels.ops import penalize
from hyimg_cli.kernels.transfer import Readback, to_device
from hyimg_cli.manifest.planner import TextIdentity
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.protocols import Context, GeneratedText
from hyimg_cli.pipelines.image.sampling import Draw, choose, uniform_numbers
from hyimg_cli.pipelines.out_of_memory import Attempt
from hyimg_cli.spec.job import ImageJob

_KEPT_BYTES = 64_000_000
# Its scope, its job's inputs, the bytes of its sources.
Key = tuple[str, TextIdentity, tuple[str, ...]]


@dataclass(eq=False)
class ChosenToken:
    """A token that is chosen on the device and not known here yet; `is_void`: nor wanted."""

    decoding: "DecodeRequest"
    ids_R: Tensor
    row: int
    is_free: bool
    is_void: bool = False

    @property
    def id_1(self) -> Tensor:
        """The token's id, [1], on the device."""
        return self.ids_R[self.row : self.row + 1]


class DecodeRequest:
    """One job's text while it is decoded: what is chosen, what was fed, what may follow."""

    def __init__(self, job: ImageJob, model: DecoderModel, context: Context) -> None:
        self.context = context
        self._name, self._prompt_stop = job.custom_id, len(context.ids)
        self.overdecoded = 0
        # Tokens that entered the context together; of a text that is read late, one at a time.
        self.runs: list[tuple[int, ...]] = []
        self.is_done = False
        self._script = model.script(job)
        self._written = [*self._script.opening]
        self._unwritten = len(context.ids) - len(self._written)
        budget = model.text_budget(job, context)
        self._limit = len(self._written) + budget
        self._text, self._drawn = job.text, 0
        self._uniform = uniform_numbers(job.ar_seed, budget)
        self._penalty = model.card.defaults.repetition_penalty
        self._cut = ""
        self._allowed: tuple[int, ...] | None = None
        self._choice: ChosenToken | None = None
        self._is_fed_ahead = False
        self._go_on()

    @property
    def count(self) -> int:
        """Tokens of the text that are known."""
        return len(self._written)

    @property
    def can_step(self) -> bool:
        """True if another token can be chosen now; behind an unread one only a free choice may
        stand, and only where the limit leaves room for it.
        """
        if self._choice is None:
            return not self.is_done
        return self._choice.is_free and len(self._written) + 1 < self._limit

    def unfed(self) -> list[int] | Tensor:
        """Chosen tokens that the context does not have yet; on the device where it is not read."""
        return self._unfed_ids() if self._choice is None else self._choice.id_1

    def fed(self) -> None:
        """Note that the context has them now."""
        if self._choice is None:
            run = self._unfed_ids()
            self.context.ids.extend(run)
            self.runs.append(tuple(run))
        else:
            self._is_fed_ahead = True

    def draw(self) -> Draw:
        """How the next token is to be chosen."""
        if self._is_free:
            text, uniform = self._text, self._uniform[self._drawn]
            return Draw(text.temperature, text.top_k, text.top_p, uniform)
        return Draw(0.0, 0, 1.0, allowed=self._allowed)

    def penalize(self, logits_V: Tensor) -> None:
        """Change the logits of the next token by all that stands before it, prompt and tags
        included, in place.
        """
        if self._penalty == 1:
            return
        known = [*self.context.ids[: self._unwritten], *self._written]
        ids_N = to_device(known, logits_V.device)
        if self._choice is not None:
            ids_N = torch.cat([ids_N, self._choice.id_1.to(logits_V.device)])
        penalize(logits_V, ids_N, self._penalty)

    def chosen(self, ids_R: Tensor, row: int) -> ChosenToken:
        """Note that the next token is chosen: it stands in `row` of the device's ids."""
        self._choice = ChosenToken(self, ids_R, row, self._is_free)
        self._drawn += self._is_free
        return self._choice

    def accept(self, choice: ChosenToken, id_: int) -> None:
        """Write a token that is known now, and what must follow it; or end the text before it."""
        if choice.is_free and (why := self._script.early_end(id_)):
            self._end(why, before=id_)
        else:
            self._written.append(id_)
        is_latest = choice is self._choice
        if is_latest:
            self._choice = None
        self._go_on()
        if not self._is_fed_ahead:
            return
        self._is_fed_ahead = False
        if not self.is_done and self._allowed is None and self._unfed_ids() == [id_]:
            self.context.ids.append(id_)
            self.runs.append((id_,))
            return
        # Undo the row that was fed, and drop what was chosen behind it.
        self._withdraw()
        if not is_latest and self._choice is not None:
            self._choice.is_void = True
            self._choice = None
            self._drawn -= 1

    def written(self, model: DecoderModel) -> "CachedText":
        """The finished text, what was decided behind it, and how its tokens were fed."""
        ids = self._script.text_of(self._written)
        ending = tuple(self._written[len(ids) :])
        text = GeneratedText(tuple(ids), model.decode_text(ids), self._cut, ending)
        fed = tuple(self.context.ids[self._prompt_stop :])
        return CachedText(text, fed, tuple(self.runs), self._name)

    @property
    def _is_free(self) -> bool:
        # Behind an unread choice the next one is free as well, or it will be taken back.
        return self._choice is not None or self._allowed is None

    def _unfed_ids(self) -> list[int]:
        return self._written[len(self.context.ids) - self._unwritten :]

    def _go_on(self) -> None:
        """Write whatever needs no choice, up to where one is needed or all is done."""
        while not self._script.is_done(self._written[-1]):
            is_full = len(self._written) >= self._limit
            if is_full and not self._cut and self._script.is_open(self._written):
                self._end("the text reached its token limit; its open tag was closed")
            if self.is_done:
                return
            self._allowed = self._script.allowed(self._written[-1])
            if self._allowed is None or len(self._allowed) > 1:
                return
            self._written.append(self._allowed[0])
        self.is_done = True

    def _withdraw(self) -> None:
        """Take the rows back out of the buffer that are no part of the context."""
        buffer = self.context.buffer
        assert buffer is not None, "a job that writes has a context"
        self.overdecoded += buffer.length - len(self.context.ids)
        buffer.withdraw(len(self.context.ids))

    def _end(self, why: str, before: int | None = None) -> None:
        """Close the text here, which lacks its closing tag."""
        self._cut = why
        self._written = self._script.forced_ending(self._written, before)
        self.is_done = self._script.is_done(self._written[-1])
        # A tag that opened nothing is left out, and may have been fed.
        fed = self.context.ids[self._unwritten :]
        pairs = enumerate(zip(fed, self._written, strict=False))
        kept = next((n for n, (was, is_) in pairs if was != is_), min(len(fed), len(self._written)))
        if kept < len(fed):
            del self.context.ids[self._unwritten + kept :]
            self._withdraw()


# The decodings whose latest token was read, and why one could not be read or written: that one
# cannot go on.
Read = dict[DecodeRequest, Exception | None]


class DecodeLoop:
    """Decode steps of many decodings: one forward, one choice each, one copy of all ids a step."""

    def __init__(self, model: DecoderModel, *, lag: int) -> None:
        """`lag`: how many steps stay unread behind the newest: 0, or 1 to keep a device busy."""
        assert lag in (0, 1), "a row is taken back one step deep"
        self._model, self._lag = model, lag
        # A step's choices, and their ids on the way here.
        self._unread: deque[tuple[list[ChosenToken], Readback]] = deque()

    def step(self, decodings: Sequence[DecodeRequest]) -> Read:
        """Launch a step of every decoding that can go on, then read the one before."""
        going = [decoding for decoding in decodings if decoding.can_step]
        if going:
            self._launch(going)
        return self._read(keep=self._lag if going else 0)

    def settle(self) -> Read:
        """Read whatever is on its way: no decoding has an unknown token then."""
        return self._read(keep=0)

    def _launch(self, decodings: list[DecodeRequest]) -> None:
        behind = [(decoding, unfed) for decoding in decodings if len(unfed := decoding.unfed())]
        if behind:
            self._model.feed([(decoding.context, unfed) for decoding, unfed in behind])
        for decoding, _ in behind:
            decoding.fed()
        draws = [decoding.draw() for decoding in decodings]
        logits_RV = self._model.text_logits([decoding.context for decoding in decodings])
        for logits_V, decoding in zip(logits_RV, decodings, strict=True):
            decoding.penalize(logits_V)
        ids_R = choose(logits_RV, draws)
        choices = [decoding.chosen(ids_R, row) for row, decoding in enumerate(decodings)]
        self._unread.append((choices, Readback(ids_R)))

    def _read(self, *, keep: int) -> Read:
        read: Read = {}
        while len(self._unread) > keep:
            launched, readback = self._unread.popleft()
            choices = [choice for choice in launched if not choice.is_void]
            try:
                id_of = dict(zip(launched, readback.values(), strict=True))
            except Exception as error:
                read |= {choice.decoding: error for choice in choices}
                continue
            for choice in choices:
                with Attempt() as tried:
                    choice.decoding.accept(choice, id_of[choice])
                # One that failed stays failed, whatever was launched behind it.
                read[choice.decoding] = read.get(choice.decoding) or tried.error
        return read


@dataclass(frozen=True)
class CachedText:
    """A text, and `writer`, the job that wrote it.

    `fed`: the ids that its context has behind the prompt. `runs`: how they entered the network,
    with what was withdrawn at the end: fed so again, they give the same K/V to the bit.
    """

    text: GeneratedText
    fed: tuple[int, ...]
    runs: tuple[tuple[int, ...], ...]
    writer: str

    @property
    def note(self) -> dict[str, Any]:
        """How the text's tokens entered the network, for `Replay`."""
        entered = [id_ for run in self.runs for id_ in run]
        return {
            "cut": self.text.cut,
            "ending": list(self.text.ending),
            "lengths": [len(run) for run in self.runs],
            "withdrawn": entered[len(self.fed) :],
        }


class Texts(Memo[Key, CachedText]):
    """The texts of one model, by inputs and sources of the jobs that write them; those that were
    asked for longest ago go first.
    """

    def __init__(self) -> None:
        # Ids twice, as a text and as runs, and the text itself.
        super().__init__(_KEPT_BYTES, lambda known: 1024 + 128 * len(known.fed))


def repeated_texts(texts: Iterable[Hashable | None]) -> set[int]:
    """Hashes of the texts that several jobs of a group share; None stands for a text that no other
    job can have.
    """
    # Eight bytes each: of a million texts most are one job's alone.
    hashes = np.fromiter(map(hash, filter(None, texts)), np.int64)
    found, counts = np.unique(hashes, return_counts=True)
    return set(found[counts > 1].tolist())
