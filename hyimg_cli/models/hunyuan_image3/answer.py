"""Rules of an answer, the text of an i2t or t2t job; no torch.

    prompt ▸ "Assistant: " ▸ answer ▸ <|endoftext|>
    prompt ▸ "Assistant: <think>" ▸ thoughts ▸ </think> ▸ answer ▸ <|endoftext|>

Officially an answer ends at `<|endoftext|>`, which is not part of it here. Differences:

- `</answer>` ends it too, and an `<answer>` or `<recaption>` at its start is not part of it: the
  model was trained with these tags around other texts.
- `<boi>`, `<img_size_*>` or a ratio token begins a picture, which nothing draws: the answer ends.
- Officially a thinking text ends at `</think>`, and nothing answers after it. Here the text goes on
  with nothing forced. This is our own choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hyimg_cli.models.hunyuan_image3.script import trigger
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary
from hyimg_cli.models.protocols import Answer, Finish, GeneratedText, TextScript
from hyimg_cli.spec.options import BotTask


@dataclass
class AnswerScript(TextScript):
    """Rules for one answer. What is written begins with `opening`, the tag of a thinking text."""

    opening: Sequence[int] = field(init=False)
    end: int = field(init=False)
    vocabulary: Vocabulary
    bot_task: BotTask

    def __post_init__(self) -> None:
        self.opening = self.vocabulary.encode(trigger(self.bot_task))
        self.end = self.vocabulary.eos

    def is_done(self, last: int) -> bool:
        words = self.vocabulary
        return last in (words.eos, words.end_answer, *self._pictures)

    def answer(self, text: GeneratedText) -> Answer:
        """Return the answer in a text: without the tags around it, and what was thought before."""
        words, ids = self.vocabulary, [*(text.ids or ())]
        finish: Finish = "length" if text.cut else "stop"
        last, warnings, thought = ids.pop(), list[str](), None
        if text.cut:
            warnings.append("the answer reached its token limit")
        elif last in self._pictures:
            finish = "picture"
            warnings.append("the model began a picture: its answer ends before it")
        if self.opening:
            stop = ids.index(words.end_think) if words.end_think in ids else len(ids)
            thought, ids = words.decode(ids[len(self.opening) : stop]), ids[stop + 1 :]
        if ids[:1] == [words.recaption]:
            warnings.append("the model began a recaption: its tag is not part of the answer")
        if ids[:1] in ([words.answer], [words.recaption]):
            del ids[0]
        return Answer(words.decode(ids), tuple(ids), finish, thought, tuple(warnings))

    @property
    def _pictures(self) -> tuple[int, ...]:
        """Return the ids that begin a picture."""
        words = self.vocabulary
        return words.boi, words.img_size, *words.ratios
