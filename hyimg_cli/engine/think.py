"""The AR stage: text, token by token, for any number of jobs at once."""

# Legend: V vocabulary, R row (a job that writes)
from collections.abc import Sequence
from typing import cast

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hyimg_cli.models.protocols import Context, MixedModel, Written
from hyimg_cli.spec.job import ImageJob, TextSampling


class TextSampler:
    """Picks a token from logits: temperature, then top-k, then top-p, by a generator of its own."""

    def __init__(self, sampling: TextSampling) -> None:
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._is_greedy = sampling.temperature == 0
        self._warpers = LogitsProcessorList()
        if not self._is_greedy:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits_V: Tensor) -> int:
        if self._is_greedy:
            return int(logits_V.argmax())
        no_history = torch.zeros(1, 0, dtype=torch.long)
        warped = self._warpers(cast(LongTensor, no_history), cast(FloatTensor, logits_V[None]))
        chosen = torch.multinomial(warped.softmax(dim=-1), 1, generator=self._generator)
        return int(chosen)


class Writer:
    """One job's text while it is being written: what is chosen, what was fed, what may follow."""

    def __init__(self, job: ImageJob, model: MixedModel, context: Context) -> None:
        self.context = context
        self.steps = 0
        self._needs_ratio = job.size.is_auto
        self._script = model.script(job)
        self._sample = TextSampler(job.text)
        self._written = model.opening_ids(job)
        self._unwritten = len(context.ids) - len(self._written)
        self._limit = len(self._written) + model.text_budget(job, context)
        self._is_truncated = False
        self._is_done = False
        self._allowed: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """Tokens chosen so far."""
        return len(self._written)

    def unfed(self) -> list[int]:
        """Chosen tokens that the context does not have yet."""
        return self._written[len(self.context.ids) - self._unwritten :]

    def advance(self) -> bool:
        """Write whatever needs no choice; whether logits are needed now, or else all is done."""
        while not self._is_done and not self._script.is_done(self._written[-1]):
            self._end_at_the_limit()
            if self._is_done:
                break
            self._allowed = self._script.allowed(self._written[-1])
            if self._allowed is None or len(self._allowed) > 1:
                return True
            self._written.append(self._allowed[0])
        self._is_done = True
        return False

    def choose(self, logits_V: Tensor) -> None:
        """Write the next token: sampled, or the best of those allowed."""
        allowed = self._allowed
        self._written.append(self._sample(logits_V) if allowed is None else best(logits_V, allowed))

    def written(self, model: MixedModel) -> Written:
        """The finished text and the ratio token behind it."""
        ids = self._script.text_of(self._written)
        ratio_id = self._written[-1] if self._needs_ratio else None
        text = model.decode_text(ids)
        return Written(tuple(ids), text, self._is_truncated, ratio_id, self.steps)

    def _end_at_the_limit(self) -> None:
        has_room = len(self._written) < self._limit
        if has_room or self._is_truncated or not self._script.is_open(self._written):
            return
        self._is_truncated = True
        self._written = self._script.forced_ending(self._written)
        self._is_done = not self._needs_ratio


def write_together(model: MixedModel, writers: Sequence[Writer]) -> None:
    """One decode step of every writer, all of which need logits: one forward, one choice each."""
    runs = [(writer.context, unfed) for writer in writers if (unfed := writer.unfed())]
    if runs:
        model.feed(runs)
    for writer, logits_V in zip(
        writers, model.text_logits([writer.context for writer in writers]), strict=True
    ):
        writer.steps += 1
        writer.choose(logits_V)


def best(logits_V: Tensor, ids: Sequence[int]) -> int:
    """The id with the largest logit; the first of equals."""
    return ids[int(logits_V[torch.tensor(ids)].argmax())]
