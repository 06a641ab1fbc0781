"""Turn a job for BAGEL-7B-MoT into its contexts, and count them; no torch."""

import re
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from hyimg_cli.errors import JobError
from hyimg_cli.kv.segments import Segment
from hyimg_cli.manifest.cost import JobTokens
from hyimg_cli.models.bagel.config import model_card, read_architecture
from hyimg_cli.models.bagel.sequence import (
    BlockLayout,
    Contexts,
    Markers,
    SourcePlace,
    contexts,
    picture_grid,
    segments,
    source_shape,
)
from hyimg_cli.models.common.tokenizer import ControlTokenizer, read_tokenizer, refuse_unknown_ids
from hyimg_cli.models.family import ImageCheckpoint
from hyimg_cli.models.protocols import Answer, GeneratedText, TextPrompt, TextScript
from hyimg_cli.spec.card import NO_RATIO, Bucket
from hyimg_cli.spec.job import GUIDANCE_FIELDS, ImageJob, Size, TextJob

# The start of every request that thinks. The space before the line break is part of it.
THINK_PROMPT = (
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, i.e. <think> planning process "
    "here </think> image here"
)
# The same for a text about pictures.
ANSWER_PROMPT = (
    "You should first think about the reasoning process in the mind and then provide the user with "
    "the answer. \nThe reasoning process is enclosed within <think> </think> tags, i.e. <think> "
    "reasoning process here </think> answer here"
)
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_MARKERS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")


class QwenVocabulary(ControlTokenizer):
    """Text to ids and back, and the markers' ids, looked up by name."""

    def __init__(self, folder: Path) -> None:
        """Raise CheckpointError if `tokenizer.json` is missing or damaged."""
        super().__init__(read_tokenizer(folder))
        self.markers = Markers(*(self.id_of(name) for name in _MARKERS))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without the markers around it; image tokens have no text."""
        return super().decode([id_ for id_ in self.inner(ids) if id_ >= 0])

    def inner(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text without the markers around it."""
        kept = list(ids)
        if kept[:1] == [self.markers.bos]:
            del kept[0]
        if kept[-1:] == [self.markers.eos]:
            del kept[-1]
        return kept


class BagelPrompter(ImageCheckpoint):
    """Contexts for one checkpoint. Raises CheckpointError if its files are incomplete."""

    segments = staticmethod(segments)

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.arch = read_architecture(folder)
        self.card = model_card(folder, model, self.arch)
        self.vocabulary = QwenVocabulary(folder)
        self.markers = self.vocabulary.markers

    def refuse_other_vocabulary(self) -> None:
        """Raise CheckpointError if the tokenizer has tokens that the network does not know."""
        self.vocabulary.refuse_beyond(self.arch.decoder.vocab_size, self.folder)

    def memo_counts(self) -> dict[str, dict[str, int]]:
        """Return look-ups of texts' tokens."""
        return {"prompt_tokens": self.vocabulary.memo_counts()}

    def check(self, job: ImageJob) -> None:
        if isinstance(job, TextJob):
            self.vocabulary.refuse_control("prompt", self.vocabulary.encode(job.prompt))
            if job.use_system_prompt != "None":
                raise JobError(
                    "BAGEL answers without a system prompt",
                    where="system_prompt" if job.system_prompt else "use_system_prompt",
                    hint="remove the field, and write what matters into the prompt",
                    code="job.unconsumed",
                )
            self._refuse_too_long(self._question(job, self._unread(job)))
            self.opening(job, self._unread(job))
            return
        self._refuse_unread(job)
        for field, text in (("prompt", job.prompt), ("cot_text", job.cot_text or "")):
            self.vocabulary.refuse_control(field, self.vocabulary.encode(text))
        refuse_unknown_ids(job.cot_token_ids or (), self.card.vocab_size)
        # A picture takes one position per block.
        shape = source_shape(Size(1, 1), self.arch)
        self._refuse_too_long(self.contexts(job, [shape] * len(job.images)).full)
        self.opening(job, [shape] * len(job.images))

    def contexts(
        self, job: ImageJob, shapes: Sequence[SourcePlace], written: Sequence[int] | None = None
    ) -> Contexts:
        """Return the contexts of a job's branches: pictures, prompt, then its text.

        The text was `written` for the job, or is its own; it is read again as tokens, as published.
        """
        text, thinks = None, job.writes_text or job.has_given_text
        if written is not None or job.cot_token_ids is not None:
            ids = job.cot_token_ids if written is None else written
            text = self.vocabulary.encode(self.vocabulary.decode(ids or ()))
        elif job.cot_text is not None:
            text = self.vocabulary.encode(job.cot_text)
        return contexts(
            self.markers,
            [*shapes, self.vocabulary.encode(job.prompt)],
            system=self.vocabulary.encode(THINK_PROMPT) if thinks else None,
            written=text,
        )

    def opening(self, job: ImageJob, shapes: Sequence[SourcePlace]) -> TextPrompt | None:
        """Return the text stage's prompt, up to the text's first marker; None without a text."""
        if isinstance(job, TextJob):
            layout = self._question(job, shapes).opening()
            room = max((len(self.choice(one)) for one in job.choices), default=0)
            room = room or self.text_budget(job, layout)
            return TextPrompt(layout.ids, layout.length + room + 2, layout)
        if not job.writes_text:
            return None
        layout = self.contexts(job, shapes).full.opening()
        return TextPrompt(layout.ids, layout.length + self.text_budget(job, layout) + 2, layout)

    def _question(self, job: TextJob, shapes: Sequence[SourcePlace]) -> BlockLayout:
        """Return what stands before an answer: a system text if it thinks, pictures, question."""
        layout, words = BlockLayout(self.markers), self.vocabulary
        if job.bot_task == "think":
            layout = layout.text(words.encode(ANSWER_PROMPT))
        for number, shape in enumerate(shapes):
            layout = layout.seen(shape, number)
        return layout.text(words.encode(job.prompt))

    def choice(self, text: str) -> tuple[int, ...]:
        """Return the ids of an answer that is given."""
        ids = self.vocabulary.encode(text)
        self.vocabulary.refuse_control("choices", ids)
        return tuple(ids)

    def answer(self, job: ImageJob, text: GeneratedText) -> Answer:
        """Return the answer in the text of a job that asks for one."""
        ids, thought = self.vocabulary.inner(text.ids or ()), None
        said = self.vocabulary.decode(ids)
        if job.bot_task == "think" and (found := _THOUGHT.match(said)):
            thought, said = found[1].strip(), said[found.end() :]
            ids = self.vocabulary.encode(said)
        warnings = ("the answer reached its token limit",) if text.cut else ()
        return Answer(said, tuple(ids), "length" if text.cut else "stop", thought, warnings)

    def script(self, job: ImageJob) -> TextScript:
        return TextScript((self.markers.bos,), self.markers.eos)

    def branches(self, job: ImageJob, found: Contexts) -> list[BlockLayout]:
        """Return the contexts that guidance needs: full, without the text, without the images.

        A text scale of 1 or less switches all guidance off, an image scale of 1 or less its own.
        """
        if job.guidance_scale <= 1:
            return [found.full]
        pair = [found.full, found.without_text]
        return [*pair, found.without_images] if (job.image_guidance_scale or 0) > 1 else pair

    def bucket(self, job: ImageJob, shapes: Sequence[SourcePlace]) -> Bucket:
        """Return the picture's size: as requested, as its last source's, or the card's first."""
        otherwise = shapes[-1].size if shapes else self.card.buckets[0].size
        asked = self.card.bucket_of(job.size)
        return Bucket(NO_RATIO, asked.size if asked else otherwise)

    def text_budget(self, job: ImageJob, layout: BlockLayout) -> int:
        """Return the tokens that a text may have after its first marker, which the limit counts."""
        room = self.card.max_positions - layout.next_rope - 2
        if room < 1:
            self._refuse_too_long(layout)
        return max(0, min(job.text.max_new_tokens - 1, room))

    def prefixes(self, job: ImageJob) -> list[list[Segment]]:
        shapes = self._unread(job)
        opening = self.opening(job, shapes)
        found = [opening.layout] if opening else self.branches(job, self.contexts(job, shapes))
        rows, names = dict.fromkeys(found), [*map(str, job.views)]
        return [segments(one, one.ids, names, one.length - 1) for one in rows]

    def count(self, job: ImageJob, source_sizes: Sequence[Size], assumed_think: int) -> JobTokens:
        shapes = self._shapes(source_sizes)
        opening = self.opening(job, shapes)
        if isinstance(job, TextJob):
            prompt, text = (opening.layout.length if opening else 0), 0
            text = assumed_think if job.writes_text else 0
            return JobTokens(prompt, prompt, prompt, assumed_think=text)
        found = self.contexts(job, shapes)
        text = assumed_think if job.writes_text else 0
        full, *others = dict.fromkeys(self.branches(job, found))
        positive = full.length + (text + 2 if job.writes_text else 0)
        step_rows = picture_grid(self.bucket(job, shapes).size).cells + 2
        # Guidance is on at noise levels within its interval.
        (low, high), shift = job.guidance_interval or (0.0, 1.0), job.flow_shift
        last = max(1, job.num_inference_steps - 1)
        line = (1 - step / last for step in range(last))
        guided = [low < shift * x / (1 + (shift - 1) * x) <= high for x in line]
        full_steps = guided
        if job.step_cache:
            full_steps = [*compress(guided, job.step_cache.full_steps(guided))]
        return JobTokens(
            ar_prefill=len(opening.ids) if opening else 0,
            positive=positive,
            step_rows=step_rows,
            branches=1 + len(others),
            assumed_think=text,
            steps=max(0, job.num_inference_steps - 1),
            forwards=len(full_steps) + sum(full_steps) * len(others),
            kv_rows=positive + sum(other.length - _shared(full, other) for other in others),
        )

    def _unread(self, job: ImageJob) -> list[SourcePlace]:
        """Return places of the job's pictures, which count as the largest."""
        return self._shapes([Size(1, 1)] * len(job.images))

    def _shapes(self, sizes: Sequence[Size]) -> list[SourcePlace]:
        return [source_shape(size, self.arch) for size in sizes]

    def _refuse_unread(self, job: ImageJob) -> None:
        """Raise JobError if the job sets a field that this model does not support."""
        if job.bot_task not in ("none", "think"):
            raise JobError(
                f"BAGEL does not support bot_task = {job.bot_task}",
                where="bot_task",
                hint="set bot_task to none or think",
                code="job.unconsumed",
            )
        idle = sorted(job.user_fields & {*GUIDANCE_FIELDS})
        if job.guidance_scale <= 1 and idle:
            raise JobError(
                f"{idle[0]} has no effect without guidance (guidance_scale {job.guidance_scale:g})",
                where=idle[0],
                hint="remove the field, or raise guidance_scale above 1",
                code="job.unconsumed",
            )
        if job.num_inference_steps < 2:
            raise JobError(
                "one step evaluates nothing: the last noise level is only an end point",
                where="num_inference_steps",
                hint="give 2 or more; N steps evaluate the model N - 1 times",
                code="job.too-few-steps",
            )

    def _refuse_too_long(self, layout: BlockLayout) -> None:
        # The noise takes the next position.
        if layout.next_rope >= self.card.max_positions:
            raise JobError(
                f"the texts are too long: position {layout.next_rope} of {self.card.max_positions}",
                where="prompt",
                hint="shorten the texts",
                code="job.too-long",
            )


def _shared(full: BlockLayout, other: BlockLayout) -> int:
    """Count leading tokens in common; a written text after `full` does not matter."""
    pairs = zip(full.ids, other.ids, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(full.length, other.length))
