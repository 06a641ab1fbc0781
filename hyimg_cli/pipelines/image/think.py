"""The AR stage: text, token by token, for any number of jobs at once.

    step k      feed the choice of step k-1 ─▶ logits ─▶ choose ─▶ ids, all on the device
    meanwhile   the ids of step k-1 reach the host, which checks them against the script

On a GPU a step's ids are read after the next step has been launched. If a text turns out to have
ended, or to continue with forced tokens, one row too many was decoded. That row is removed from the
buffer, its draw is made again, and it is counted separately. On a CPU ids are known at once and no
row is wasted. Ids and draws are the same either way.

The log-probability of every freely chosen token is read with its id: see `confidence`.

A finished text is kept for jobs that would write the same one: one decode, n drawings. Its key is
its job's inputs and the bytes of its sources. Its ids are kept here. Its K/V are in the tree of
prefixes, after its prompt's, as long as they fit.
"""

# Legend: V vocabulary, R row (a job that writes)
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from hyimg_cli.pipelines.image.confidence import confidence_of, read_confidence
from hyimg_cli.pipelines.image.sampling import Draw, choose, uniform_numbers
from hyimg_cli.pipelines.out_of_memory import Attempt
from hyimg_cli.spec.events import TextConfidence
from hyimg_cli.spec.job import ImageJob

_KEPT_BYTES = 64_000_000
# The text's scope, its job's inputs, and the digests of its sources.
Key = tuple[str, TextIdentity, tuple[str, ...]]


@dataclass(eq=False)
class ChosenToken:
    """A token chosen on the device and not yet read; `is_void`: no longer wanted."""

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
    """One job's text during decoding: the chosen tokens, the fed tokens, and what may follow."""

    def __init__(self, job: ImageJob, model: DecoderModel, context: Context) -> None:
        self.context = context
        self._name, self._prompt_stop = job.custom_id, len(context.ids)
        self.overdecoded = 0
        # Groups of tokens fed together; one at a time if the text is read with a lag.
        self.runs: list[tuple[int, ...]] = []
        self.is_done = False
        self._script = model.script(job)
        self._written = [*self._script.opening]
        # The log-probabilities of the freely chosen tokens, by their places in `_written`.
        self._logprobs: dict[int, float] = {}
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
        """Number of tokens of the text that are known."""
        return len(self._written)

    @property
    def ids_so_far(self) -> tuple[int, ...]:
        """The text's ids as if it ended after those that are known."""
        ending = () if self.is_done else (self._script.end,)
        return (*self._written, *ending)

    @property
    def can_step(self) -> bool:
        """True if another token can be chosen now.

        After an unread token only a free choice is possible, and only if the limit leaves room for
        it.
        """
        if self._choice is None:
            return not self.is_done
        return self._choice.is_free and len(self._written) + 1 < self._limit

    def unfed(self) -> list[int] | Tensor:
        """Return chosen tokens that the context lacks; on the device if not yet read."""
        return self._unfed_ids() if self._choice is None else self._choice.id_1

    def fed(self) -> None:
        """Record that these tokens have been fed."""
        if self._choice is None:
            run = self._unfed_ids()
            self.context.ids.extend(run)
            self.runs.append(tuple(run))
        else:
            self._is_fed_ahead = True

    def draw(self) -> Draw:
        """Return the rules for choosing the next token."""
        if self._is_free:
            text, uniform = self._text, self._uniform[self._drawn]
            return Draw(text.temperature, text.top_k, text.top_p, uniform)
        return Draw(0.0, 0, 1.0, allowed=self._allowed)

    def penalize(self, logits_V: Tensor) -> None:
        """Apply the repetition penalty for all earlier tokens to the next logits, in place."""
        if self._penalty == 1:
            return
        known = [*self.context.ids[: self._unwritten], *self._written]
        ids_N = to_device(known, logits_V.device)
        if self._choice is not None:
            ids_N = torch.cat([ids_N, self._choice.id_1.to(logits_V.device)])
        penalize(logits_V, ids_N, self._penalty)

    def chosen(self, ids_R: Tensor, row: int) -> ChosenToken:
        """Record that the next token was chosen; its id is in `row` of `ids_R` on the device."""
        self._choice = ChosenToken(self, ids_R, row, self._is_free)
        self._drawn += self._is_free
        return self._choice

    def accept(self, choice: ChosenToken, id_: int, logprob: float) -> None:
        """Append a token that has been read, and the tokens that must follow it.

        Ends the text before this token if the script says so. `logprob`: see `DecodeLoop`.
        """
        if choice.is_free and (why := self._script.early_end(id_)):
            self._end(why, before=id_)
        else:
            if choice.is_free:
                self._logprobs[len(self._written)] = logprob
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
        # Remove the row that was fed, and drop the choice made after it.
        self._withdraw()
        if not is_latest and self._choice is not None:
            self._choice.is_void = True
            self._choice = None
            self._drawn -= 1

    def written(self, model: DecoderModel) -> "CachedText":
        """Return the finished text, the choices made after it, and how its tokens were fed."""
        ids = self._script.text_of(self._written)
        ending = tuple(self._written[len(ids) :])
        text = GeneratedText(tuple(ids), model.decode_text(ids), self._cut, ending)
        fed = tuple(self.context.ids[self._prompt_stop :])
        confidence = confidence_of(self._logprobs, self._script.recaption(ids))
        return CachedText(text, fed, tuple(self.runs), self._name, confidence)

    @property
    def _is_free(self) -> bool:
        # After an unread choice the next one is free too, or it will be taken back.
        return self._choice is not None or self._allowed is None

    def _unfed_ids(self) -> list[int]:
        return self._written[len(self.context.ids) - self._unwritten :]

    def _go_on(self) -> None:
        """Append all forced tokens, up to the next choice or the end."""
        while not self._script.is_done(self._last):
            is_full = len(self._written) >= self._limit
            if is_full and not self._cut and self._script.is_open(self._written):
                self._end("the text reached its token limit; its open tag was closed")
            if self.is_done:
                return
            self._allowed = self._script.allowed(self._last)
            if self._allowed is None or len(self._allowed) > 1:
                return
            self._written.append(self._allowed[0])
        self.is_done = True

    @property
    def _last(self) -> int:
        """The last id: of the prompt, for a text without a tag that opens it."""
        return self._written[-1] if self._written else self.context.ids[-1]

    def _withdraw(self) -> None:
        """Remove the buffer rows that are not part of the context."""
        buffer = self.context.buffer
        assert buffer is not None, "a job that writes has a context"
        self.overdecoded += buffer.length - len(self.context.ids)
        buffer.truncate(len(self.context.ids))

    def _end(self, why: str, before: int | None = None) -> None:
        """Close the text here, although it lacks its closing tag."""
        self._cut, chosen = why, self._written
        self._written = self._script.forced_ending(chosen, before)
        kept = _common(chosen, self._written)
        self._logprobs = {at: logprob for at, logprob in self._logprobs.items() if at < kept}
        self.is_done = self._script.is_done(self._last)
        # A tag that opened nothing is left out, but may have been fed.
        fed = self.context.ids[self._unwritten :]
        kept = _common(fed, self._written)
        if kept < len(fed):
            del self.context.ids[self._unwritten + kept :]
            self._withdraw()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading ids are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


# The decodings whose latest token was read, each with the error if it could not be read or written.
# A decoding with an error cannot continue.
Read = dict[DecodeRequest, Exception | None]


class DecodeLoop:
    """Runs steps of many decodings: per step one forward, one choice each, one copy of ids."""

    def __init__(self, model: DecoderModel, *, lag: int) -> None:
        """`lag`: number of launched steps that stay unread: 0, or 1 to keep a device busy."""
        assert lag in (0, 1), "a row is taken back one step deep"
        self._model, self._lag = model, lag
        # The choices of a step, and their ids and log-probabilities on the way to the host.
        self._unread: deque[tuple[list[ChosenToken], Readback]] = deque()

    def step(self, decodings: Sequence[DecodeRequest]) -> Read:
        """Launch a step of every decoding that can continue, then read the step before it."""
        going = [decoding for decoding in decodings if decoding.can_step]
        if going:
            self._launch(going)
        return self._read(keep=self._lag if going else 0)

    def settle(self) -> Read:
        """Read everything in transfer; afterwards no decoding has an unread token."""
        return self._read(keep=0)

    def _launch(self, decodings: list[DecodeRequest]) -> None:
        behind = [(decoding, unfed) for decoding in decodings if len(unfed := decoding.unfed())]
        if behind:
            self._model.feed([(decoding.context, unfed) for decoding, unfed in behind])
        for decoding, _ in behind:
            decoding.fed()
        draws = [decoding.draw() for decoding in decodings]
        logits_RV = self._model.text_logits([decoding.context for decoding in decodings])
        # What the model itself finds: at temperature 1, before anything is masked.
        logprob_RV = logits_RV.log_softmax(dim=-1)
        for logits_V, decoding in zip(logits_RV, decodings, strict=True):
            decoding.penalize(logits_V)
        ids_R = choose(logits_RV, draws)
        choices = [decoding.chosen(ids_R, row) for row, decoding in enumerate(decodings)]
        logprob_R = logprob_RV.gather(1, ids_R[:, None])[:, 0]
        # One copy; float64 holds every id exactly.
        self._unread.append((choices, Readback(torch.stack([ids_R.double(), logprob_R.double()]))))

    def _read(self, *, keep: int) -> Read:
        read: Read = {}
        while len(self._unread) > keep:
            launched, readback = self._unread.popleft()
            choices = [choice for choice in launched if not choice.is_void]
            try:
                ids, logprobs = readback.values()
                values = zip(map(int, ids), logprobs, strict=True)
                value_of = dict(zip(launched, values, strict=True))
            except Exception as error:
                read |= {choice.decoding: error for choice in choices}
                continue
            for choice in choices:
                with Attempt() as tried:
                    choice.decoding.accept(choice, *value_of[choice])
                # A decoding that failed stays failed, whatever was launched after it.
                read[choice.decoding] = read.get(choice.decoding) or tried.error
        return read


@dataclass(frozen=True)
class CachedText:
    """A text, and `writer`, the job that wrote it, with what `confidence` it had.

    `fed`: the ids in its context after the prompt. `runs`: the groups in which they were fed,
    including ids that were withdrawn at the end. Feeding the same groups again gives the same K/V
    to the bit.
    """

    text: GeneratedText
    fed: tuple[int, ...]
    runs: tuple[tuple[int, ...], ...]
    writer: str
    confidence: TextConfidence | None = None

    @property
    def record(self) -> dict[str, Any]:
        """The whole text in JSON; see `of_record`."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "CachedText":
        """Return the text of a `record`. Raises KeyError or TypeError for anything else."""
        text = record["text"]
        ids = None if text["ids"] is None else tuple(text["ids"])
        written = GeneratedText(ids, text["text"], text["cut"], tuple(text["ending"]))
        runs = tuple(map(tuple, record["runs"]))
        confidence = read_confidence(record.get("confidence"))
        return cls(written, tuple(record["fed"]), runs, record["writer"], confidence)

    @property
    def note(self) -> dict[str, Any]:
        """The record of how the text's tokens were fed, for `Replay`."""
        entered = [id_ for run in self.runs for id_ in run]
        return {
            "cut": self.text.cut,
            "ending": list(self.text.ending),
            "lengths": [len(run) for run in self.runs],
            "withdrawn": entered[len(self.fed) :],
        } | ({"confidence": asdict(self.confidence)} if self.confidence else {})


class Texts(Memo[Key, CachedText]):
    """The texts of one model, by inputs and sources of the jobs that write them.

    The least recently used texts are evicted first.
    """

    def __init__(self) -> None:
        # The ids are stored twice, as a text and as runs, in addition to the text itself.
        super().__init__(_KEPT_BYTES, lambda known: 1024 + 128 * len(known.fed))


def repeated_texts(texts: Iterable[Hashable | None]) -> set[int]:
    """Return hashes of the texts that several jobs of a group share.

    None represents a text that no other job can have.
    """
    # Eight bytes each: of a million texts, most belong to a single job.
    hashes = np.fromiter(map(hash, filter(None, texts)), np.int64)
    found, counts = np.unique(hashes, return_counts=True)
    return set(found[counts > 1].tolist())
