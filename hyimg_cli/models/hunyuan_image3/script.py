"""Rules of what the AR stage may write next, and when it is done; no torch.

The official code does this with two logits processors in one decode; here a small state machine
either leaves the choice free or names the allowed ids. Golden case 13 holds a trace.

A text also ends if `<answer>`, `<boi>`, `<img_size_*>` or a ratio token is sampled: what follows
one of them belongs to a picture. With size `auto`, the official loop ends at a ratio token, which
is the size, or after the base size's token, when only a ratio may follow. Differences here:

- The text ends before any of the four. The official one continues after `<answer>` and `<boi>`, and
  with a given size after all of them, up to the closing tag or the limit.
- The token and what follows are not part of the text. Officially the text is everything up to the
  closing tag, or, without one, everything.
- The open tag is closed, as at the token limit; officially it stays open.
- Only a ratio token is the size by itself. After the others the closed text is followed by all that
  opens a picture, and by the best ratio there. The same holds for a ratio token whose size the
  checkpoint's card leaves out.
- A text may repeat a tag, such as a second `</think>` inside its recaption. The picture sees all of
  the text; officially, what follows the second one is lost (`sequence`).
- The picture sees the ids as they were sampled. The official code decodes them, and encodes the
  text again, which may give other ids.

Other control tokens, including `<|endoftext|>`, do not end a text in either. The base model's own
code also ends one at `</answer>` and `<|endoftext|>`, and always asks for the ratio after it, as
here. There `think` continues freely after `</think>`, and ends after the recaption.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hyimg_cli.models.hunyuan_image3.config import Template
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary
from hyimg_cli.models.protocols import TextScript
from hyimg_cli.spec.options import BotTask


def trigger(bot_task: BotTask) -> str:
    """Return the tag that opens the AR stage's text; empty if none is written."""
    return {"think": "<think>", "think_recaption": "<think>", "recaption": "<recaption>"}.get(
        bot_task, ""
    )


@dataclass
class Script(TextScript):
    """Transitions between the stages of one job's writing; each fires once.

    `needs_ratio`: the size is `auto`, so that after the text come `<answer>` (instruct template
    only), `<boi>`, `<img_size_*>` and one of the `ratios` tokens, always the most likely.
    """

    opening: Sequence[int] = field(init=False)
    end: int = field(init=False)
    vocabulary: Vocabulary
    bot_task: BotTask
    needs_ratio: bool
    template: Template
    ratios: tuple[int, ...]
    is_base: bool = False
    _fired: set[int] = field(default_factory=set)
    _queue: list[tuple[int, ...]] = field(default_factory=list)
    _is_ending: bool = False

    def __post_init__(self) -> None:
        words, is_think = self.vocabulary, self.bot_task == "think" and not self.is_base
        self.opening = words.encode(trigger(self.bot_task))
        self.end = words.end_think if is_think else words.end_recaption

    @property
    def ending(self) -> list[tuple[int, ...]]:
        """Return the allowed ids of each token after the text: picture opening, then ratio."""
        if not self.needs_ratio:
            return []
        words = self.vocabulary
        answer = [(words.answer,)] if self.template == "instruct" else []
        return [*answer, (words.boi,), (words.img_size,), self.ratios]

    def allowed(self, last: int) -> tuple[int, ...] | None:
        if not self._queue and last not in self._fired:
            self._fired.add(last)
            if last == self.vocabulary.end_think and self.bot_task == "think_recaption":
                self._queue = [(self.vocabulary.recaption,)]
            elif last == self.end:
                self._is_ending, self._queue = True, self.ending
        return self._queue.pop(0) if self._queue else None

    def is_done(self, last: int) -> bool:
        if self.needs_ratio or self._is_ending:
            return self._is_ending and not self._queue
        # NOTE: upstream stops plain `think` at either tag when the size is given.
        return last in (self.end, self.vocabulary.end_recaption)

    def early_end(self, id_: int) -> str:
        words, name = self.vocabulary, self.vocabulary.name
        is_end_of_base = self.is_base and id_ in (words.end_answer, words.eos)
        if not is_end_of_base and id_ not in words.openers:
            return ""
        return f"the text ended early at {name(id_)}, before {name(self.end)}"

    def recaption(self, ids: Sequence[int]) -> int | None:
        tag = self.vocabulary.recaption
        return ids.index(tag) if tag in ids else None

    def text_of(self, written: list[int]) -> list[int]:
        return written[: len(written) - len(self.ending)]

    def forced_ending(self, written: list[int], before: int | None = None) -> list[int]:
        """Close the open tag; drop a recaption that has not begun, with its tag.

        If a ratio is needed, its opening follows, and the ratio: the sampled token if it is one.
        """
        words = self.vocabulary
        kept = list(written)
        if kept[-1] == words.recaption and words.end_think in kept:
            kept.pop()
        closing = {words.think: words.end_think, words.recaption: words.end_recaption}
        places = (place for place, id_ in enumerate(kept) if id_ in closing)
        opened = [kept[place] for place in places if closing[kept[place]] not in kept[place:]]
        kept += [closing[tag] for tag in opened[-1:]]
        self._is_ending, self._queue = True, self.ending
        if self._queue and before in self.ratios and not self.is_base:
            self._queue[-1] = (before,)
        return kept
