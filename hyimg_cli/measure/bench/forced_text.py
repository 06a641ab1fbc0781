"""A model whose text is decided beforehand, so that both variants draw from the same words."""

# Legend: R row, V vocabulary
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.models.protocols import Context, MixedModel
from hyimg_cli.spec.job import ImageJob

Texts = Mapping[str, Sequence[int]]


class ForcedText:
    """Stands between session and model: logits are computed, then all but the decided token's drop.

    `texts` holds, by job, the ids of its text as a result line has them. Where they end, and for a
    job without any, the model writes as it likes. All else is the inner model's.
    """

    def __init__(self, inner: MixedModel, texts: Texts) -> None:
        self._inner = inner
        self._texts = texts
        self._started: dict[int, tuple[Context, Sequence[int], int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def text_budget(self, job: ImageJob, context: Context) -> int:
        # A text's first ids open it and were fed with the prompt.
        opening = len(self._inner.script(job).opening)
        ids = self._texts.get(job.custom_id, ())[opening:]
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
