"""What the AR stage may write next, and when it is done; no torch.

The official code does this with two logits processors in one decode; here it is one small state
machine that either leaves the choice free or names the allowed ids. Golden case 13 holds a trace.
"""

from dataclasses import dataclass, field

from hyimg_cli.models.hunyuan_image3.config import Template
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary
from hyimg_cli.spec.job import BotTask


def trigger(bot_task: BotTask) -> str:
    """The tag that opens the AR stage's writing; empty where nothing is written."""
    return {"think": "<think>", "think_recaption": "<think>", "recaption": "<recaption>"}.get(
        bot_task, ""
    )


@dataclass
class Script:
    """Transitions between the stages of one job's writing; each fires once.

    `needs_ratio`: the size is `auto`, so that after the text come `<answer>` (instruct template only),
    `<boi>`, `<img_size_*>` and one ratio token, always the most likely.
    """

    vocabulary: Vocabulary
    bot_task: BotTask
    needs_ratio: bool
    template: Template
    _fired: set[int] = field(default_factory=set)
    _queue: list[int] = field(default_factory=list)

    @property
    def closing_tag(self) -> int:
        """The tag that ends the whole text."""
        is_think = self.bot_task == "think"
        return self.vocabulary.end_think if is_think else self.vocabulary.end_recaption

    @property
    def answer_opening(self) -> list[int]:
        """What stands between the text and the ratio token."""
        words = self.vocabulary
        answer = [words.answer] if self.template == "instruct" else []
        return [*answer, words.boi, words.img_size]

    def allowed(self, last: int) -> tuple[int, ...] | None:
        """Ids that may follow `last`, the best of them to be taken; None where sampling is free."""
        if not self._queue and last not in self._fired:
            self._queue = self._after(last)
            if self._queue:
                self._fired.add(last)
        if self._queue:
            return (self._queue.pop(0),)
        if last == self.vocabulary.img_size:
            return self.vocabulary.ratios
        return None

    def is_done(self, last: int) -> bool:
        """Whether nothing is to be written after `last`."""
        if self.needs_ratio:
            return last in self.vocabulary.ratios
        # NOTE: upstream stops plain `think` at either tag when the size is given.
        stops = {self.closing_tag, self.vocabulary.end_recaption}
        return last in stops

    def _after(self, last: int) -> list[int]:
        if last == self.vocabulary.end_think and self.bot_task == "think_recaption":
            return [self.vocabulary.recaption]
        if last == self.closing_tag and self.needs_ratio:
            return self.answer_opening
        return []

    def forced_ending(self, written: list[int]) -> list[int]:
        """Ids that end `written` at the token limit: the open tag is closed; a recaption that has not
        begun (no token after its tag) is left out with its tag. The first item of `written` is the
        trigger tag."""
        words = self.vocabulary
        closing = {words.think: words.end_think, words.recaption: words.end_recaption}
        kept = list(written)
        if kept[-1] == words.recaption and words.end_think in kept:
            kept.pop()
        opened = next((i for i in reversed(kept) if i in words.tags), None)
        if opened in closing:
            kept.append(closing[opened])
        return kept
