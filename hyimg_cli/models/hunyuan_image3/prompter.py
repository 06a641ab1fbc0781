"""Turn a job for HunyuanImage-3 into token sequences, and count them; no torch."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path

from hyimg_cli.cache.memo import Memo
from hyimg_cli.errors import JobError
from hyimg_cli.kv.segments import Segment
from hyimg_cli.manifest.cost import JobTokens
from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.common.tokenizer import refuse_unknown_ids
from hyimg_cli.models.family import ImageCheckpoint
from hyimg_cli.models.hunyuan_image3 import split
from hyimg_cli.models.hunyuan_image3.answer import AnswerScript
from hyimg_cli.models.hunyuan_image3.card import (
    model_card,
    official_buckets,
    read_architecture,
    read_generation,
)
from hyimg_cli.models.hunyuan_image3.script import Script, trigger
from hyimg_cli.models.hunyuan_image3.sequence import (
    Layout,
    LayoutBuilder,
    Section,
    SourceShape,
    Target,
    sections_of_ids,
    sections_of_text,
    segments,
)
from hyimg_cli.models.hunyuan_image3.system_prompt import shipped_text, system_prompt
from hyimg_cli.models.hunyuan_image3.vocabulary import (
    RATIO_COUNT_BASE,
    RATIO_COUNT_INSTRUCT,
    Vocabulary,
)
from hyimg_cli.models.protocols import Answer, GeneratedText, TextPrompt, TextScript
from hyimg_cli.settings.run import Quantization
from hyimg_cli.spec.card import Bucket, ModelCard, RankBytes
from hyimg_cli.spec.job import ImageJob, Size, TextJob

# Tokens around the picture: tags, <boi>, size, ratio, timestep, the distilled pair, and the end.
_FRAME_TOKENS = 16
# The embedded checkpoint, which was taught drawings alone.
_TOY = "tiny-image"
# A stand-in for any prompt: only the length differs.
_STAND_IN = "x"
# How many built sequences of a checkpoint are kept to count later jobs.
_LAYOUT_BYTES = 64_000_000


class Prompter(ImageCheckpoint):
    """Sequences for one checkpoint. Raises CheckpointError if its files are incomplete."""

    segments = staticmethod(segments)

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.card: ModelCard = model_card(folder, model)
        self.arch = read_architecture(folder)
        self.template = read_generation(folder).template
        self.vocabulary = Vocabulary.from_folder(
            folder,
            base_size=self.arch.image_base_size,
            ratio_count=RATIO_COUNT_BASE if self.arch.is_base else RATIO_COUNT_INSTRUCT,
        )
        shapes = (self.source_shape(bucket, Grid(1, 1)) for bucket in self.card.buckets)
        self._smallest = min(shapes, key=lambda shape: shape.vae_grid.cells)
        # By everything in a sequence except the prompt, the only part in which most jobs of a
        # manifest differ.
        self._layouts: Memo[Hashable, tuple[TextPrompt | None, Layout, int]] = Memo(
            _LAYOUT_BYTES, lambda pair: 1024 + 2 * 8 * pair[1].length
        )

    def refuse_other_vocabulary(self) -> None:
        """Raise CheckpointError if the tokenizer has tokens that the network does not know."""
        self.vocabulary.refuse_beyond(self.arch.vocab_size, self.folder)

    def memo_counts(self) -> dict[str, dict[str, int]]:
        """Return look-ups by kind: tokens of whole sections, and counted sequences."""
        return {"prompt_tokens": self.vocabulary.memo_counts(), "layouts": self._layouts.counts()}

    def check(self, job: ImageJob) -> None:
        """Raise JobError, with the field in `where`, for a job that the checkpoint cannot take.

        Judged by its texts; no file is read, and source images count as the smallest possible.
        """
        if isinstance(job, TextJob):
            self._check_question(job)
            return
        tokens = self._count(job, [self._smallest] * len(job.images), assumed_think=0)
        if job.writes_text:
            self._refuse_too_long(job, tokens.ar_prefill + _FRAME_TOKENS + 1)
            # The system prompt that the picture has after the text.
            closing = self.script(job).end
            is_rewritten = job.bot_task != "recaption" and closing == self.vocabulary.end_recaption
            self._picture_system(job, is_rewritten)

    def fit(self, height: int, width: int, *, is_ratio: bool = False) -> tuple[Bucket, str]:
        """Return the bucket for a picture, and a note if training left out the nearest one, or "".

        `is_ratio`: the note names a ratio, not pixels.
        """
        bucket = self.card.nearest_bucket(height, width)
        nearest = replace(self.card, buckets=official_buckets(self.arch)).nearest_bucket(
            height, width
        )
        if bucket == nearest:
            return bucket, ""
        known = ", ".join(str(b.size) for b in self.card.buckets)
        asked = f"{width}{':' if is_ratio else 'x'}{height}"
        return bucket, f"{asked} fitted to {bucket.size}: {self.card.name} makes {known}"

    def source_shape(self, bucket: Bucket, vit_grid: Grid) -> SourceShape:
        """Return the place in the sequence of a source image fitted to `bucket`."""
        vae_grid = Grid(*self.card.latent_grid(bucket.size))
        return SourceShape(bucket.ratio_index, vae_grid, vit_grid, self.card.source_vit_tokens)

    def opening(self, job: ImageJob, shapes: Sequence[SourceShape]) -> TextPrompt | None:
        """Return the AR stage's prompt; None if it has nothing to write or to decide.

        A job that writes text opens with its trigger tag; one that only needs a ratio has all that
        comes before the ratio token.
        """
        if isinstance(job, TextJob):
            return self._question(job, shapes)
        if not job.writes_text and not job.size.is_auto:
            return None
        if job.has_given_text:
            layout = self.picture(job, shapes, None, self.card.buckets[0])
            assert layout.target is not None, "a picture's layout has a target"
            return TextPrompt(layout.ids[: layout.target.ratio], layout.target.ratio + 8, layout)
        tag = trigger(job.bot_task) if job.writes_text else None
        layout = self._prompted(job, shapes, system_prompt(job, self.folder)).opening(tag)
        room = self.text_budget(job, layout.length) if job.writes_text else 0
        # After the text: its closing tag and what opens the picture, up to the ratio token.
        return TextPrompt(layout.ids, layout.length + room + 8, layout)

    def picture(
        self,
        job: ImageJob,
        shapes: Sequence[SourceShape],
        written: Sequence[int] | None,
        bucket: Bucket,
    ) -> Layout:
        """The diffusion stage's sequence, with the text that the AR stage wrote or the job gave."""
        ids, cot = self._text(job, written)
        words = self.vocabulary
        system = self._picture_system(job, words.think in ids and words.recaption in ids)
        layout = self._prompted(job, shapes, system).picture(cot, self.target(bucket))
        self._refuse_too_long(job, layout.live_start)
        return layout

    def target(self, bucket: Bucket) -> Target:
        """Return the picture's tokens for a bucket."""
        arch, grid = self.arch, Grid(*self.card.latent_grid(bucket.size))
        return Target(bucket.ratio_index, grid, arch.cfg_distilled, arch.use_meanflow)

    def _question(self, job: TextJob, shapes: Sequence[SourceShape]) -> TextPrompt:
        """Return the prompt of an answer: an edit's, up to another trigger."""
        system = system_prompt(job, self.folder)
        layout = self._prompted(job, shapes, system).opening(trigger(job.bot_task))
        room = max(map(len, map(self.choice, job.choices)), default=0)
        if not job.choices:
            room = self.text_budget(job, layout.length)
        return TextPrompt(layout.ids, layout.length + room + 1, layout)

    def choice(self, text: str) -> tuple[int, ...]:
        """Return the ids of an answer that is given."""
        ids = self.vocabulary.encode(text)
        self.vocabulary.refuse_control("choices", ids)
        return tuple(ids)

    def _check_question(self, job: TextJob) -> None:
        if self.arch.is_base:
            raise JobError(
                f"{self.card.name} was not trained to answer: it writes no text",
                where="task",
                hint="name a checkpoint of HunyuanImage-3 Instruct",
                code="job.no-text",
            )
        length = self._question(job, [self._smallest] * len(job.images)).layout.length
        self._refuse_too_long(job, length + 1)

    def advice(self, job: ImageJob) -> Sequence[str]:
        if job.draws or self.card.name != _TOY:
            return ()
        return (f"{_TOY} is a toy that was not taught to answer questions",)

    def answer(self, job: ImageJob, text: GeneratedText) -> Answer:
        """Return the answer in the text of a job that asks for one."""
        return AnswerScript(self.vocabulary, job.bot_task).answer(text)

    def script(self, job: ImageJob) -> TextScript:
        """Return the rules of the job's AR stage."""
        if not job.draws:
            return AnswerScript(self.vocabulary, job.bot_task)
        return Script(
            self.vocabulary,
            job.bot_task,
            needs_ratio=job.size.is_auto,
            template=self.template,
            ratios=self.allowed_ratios,
            is_base=self.arch.is_base,
        )

    @property
    def allowed_ratios(self) -> tuple[int, ...]:
        """Return the ids of the ratio tokens that the checkpoint may choose."""
        return tuple(self.vocabulary.ratios[bucket.ratio_index] for bucket in self.card.buckets)

    def text_budget(self, job: ImageJob, opening_length: int) -> int:
        """Return how many tokens the AR stage may write: the job's limit within the model's.

        Leaves room for a picture if possible.
        """
        if not job.draws:
            self._refuse_too_long(job, opening_length + 1)
            return min(job.text.max_new_tokens, self.card.max_positions - opening_length)
        self._refuse_too_long(job, opening_length + _FRAME_TOKENS + 1)
        room = self.card.max_positions - opening_length - _FRAME_TOKENS
        beside_picture = room - self.target(self._bucket(job)).grid.cells
        return min(job.text.max_new_tokens, beside_picture if beside_picture > 0 else room)

    def branch_count(self, job: ImageJob) -> int:
        """Return the number of a job's guidance branches.

        One for distilled networks, and for scales up to 1.
        """
        return 2 if job.guidance_scale > 1 and not self.card.is_distilled else 1

    def prefixes(self, job: ImageJob) -> list[list[Segment]]:
        shapes, names = [self._smallest] * len(job.images), [*map(str, job.views)]
        if opening := self.opening(job, shapes):
            return [segments(opening.layout, opening.ids, names, len(opening.ids) - 1)]
        layout = self.picture(job, shapes, None, self._bucket(job))
        rows = (layout.ids, layout.unconditional_ids)[: self.branch_count(job)]
        return [segments(layout, ids, names, layout.live_start - 1) for ids in rows]

    def count(self, job: ImageJob, source_sizes: Sequence[Size], assumed_think: int) -> JobTokens:
        """Count the job's tokens; text not yet written counts as `assumed_think` tokens."""
        if isinstance(job, TextJob):
            prompt = self._question(job, self._shapes(source_sizes)).layout.length
            text = assumed_think if job.writes_text else 0
            return JobTokens(prompt, prompt, prompt, assumed_think=text)
        return self._count(job, self._shapes(source_sizes), assumed_think)

    def _count(self, job: ImageJob, shapes: Sequence[SourceShape], assumed_think: int) -> JobTokens:
        opening, layout, shared = self._outline(job, shapes)
        text = assumed_think if job.writes_text else 0
        more = len(self._prompt_ids(job)) - len(self.vocabulary.encode(_STAND_IN))
        branches, prefix = self.branch_count(job), layout.live_start + more + text
        self._refuse_too_long(job, prefix)
        return JobTokens(
            ar_prefill=len(opening.ids) + more if opening else 0,
            positive=prefix,
            step_rows=layout.live_stop - layout.live_start,
            branches=branches,
            assumed_think=text,
            kv_rows=prefix + (branches - 1) * (prefix - shared),
        )

    def _outline(
        self, job: ImageJob, shapes: Sequence[SourceShape]
    ) -> tuple[TextPrompt | None, Layout, int]:
        """Return both stages' sequences, with a placeholder prompt and no written text.

        And how many leading tokens both guidance branches share.
        """
        written = () if job.writes_text else None

        def build() -> tuple[TextPrompt | None, Layout, int]:
            one = replace(job, prompt=_STAND_IN)
            layout = self.picture(one, shapes, written, self._bucket(job))
            pairs = zip(layout.ids, layout.unconditional_ids, strict=True)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            return self.opening(one, shapes), layout, min(shared, layout.live_start)

        texts = system_prompt(job, self.folder), job.cot_text, job.cot_token_ids
        key = tuple(shapes), job.bot_task, job.size, job.drop_think, texts
        return self._layouts.get(key, build)

    def _shapes(self, source_sizes: Sequence[Size]) -> list[SourceShape]:
        """Return shapes of unread pictures: the patch grid changes positions, not counts."""
        buckets = (self.card.nearest_bucket(size.height, size.width) for size in source_sizes)
        return [self.source_shape(bucket, Grid(1, 1)) for bucket in buckets]

    def _bucket(self, job: ImageJob) -> Bucket:
        """Return the picture's bucket; any if its size is not decided yet."""
        return self.card.bucket_of(job.size) or self.card.nearest_bucket(1, 1)

    def refuse_uneven(self, ranks: int, quantization: Quantization) -> None:
        split.refuse_uneven(self.arch, ranks, quantization)

    def rank_bytes(self, ranks: int, dtype: str, quantization: Quantization) -> RankBytes:
        weights, arch = self.card.weights, self.arch
        return split.rank_bytes(weights, arch, ranks, dtype=dtype, quantization=quantization)

    def _prompt_ids(self, job: ImageJob) -> list[int]:
        """Return the prompt's ids. Raises JobError for a control token in it."""
        ids = self.vocabulary.encode(job.prompt)
        self.vocabulary.refuse_control("prompt", ids)
        return ids

    def _prompted(
        self, job: ImageJob, shapes: Sequence[SourceShape], system: str | None
    ) -> LayoutBuilder:
        """Return a sequence that begins with the job's prompt."""
        self._prompt_ids(job)
        joint = self.arch.has_joint_source_span
        builder = LayoutBuilder(
            self.vocabulary, has_joint_source_span=joint, template=self.template
        )
        return builder.prompt(job.prompt, system, shapes)

    def _picture_system(self, job: ImageJob, is_rewritten: bool) -> str | None:
        """Return the picture's system prompt.

        Without its reasoning, a rewritten text has the recaption prompt.

        As upstream, which does not strip this one text: its line breaks are tokens.
        """
        system = system_prompt(job, self.folder)
        if system and job.drop_think and is_rewritten:
            return shipped_text(self.folder, "en_recaption", field="drop_think")
        return system

    def _text(
        self, job: ImageJob, written: Sequence[int] | None
    ) -> tuple[Sequence[int], list[Section]]:
        """Return the text before the picture: all its ids, and the sections that it sees.

        `written` or the job's own; the ids include the reasoning.
        """
        words, drop_think = self.vocabulary, job.drop_think
        if written is None and job.cot_token_ids is not None:
            refuse_unknown_ids(job.cot_token_ids, self.card.vocab_size)
            written = job.cot_token_ids
        if written is not None:
            return written, sections_of_ids(words, written, self.template, drop_think=drop_think)
        if job.cot_text is None:
            return (), []
        sections = sections_of_text(words, job.cot_text, self.template, drop_think=drop_think)
        allowed = {*words.tags, words.answer, words.end_answer}
        ids = chain.from_iterable(section.ids for section in sections)
        words.refuse_control("cot_text", ids, allowed=allowed)
        return words.encode(job.cot_text), sections

    def _refuse_too_long(self, job: ImageJob, length: int) -> None:
        """Raise JobError, for the longest text, if a sequence exceeds the positions."""
        if length <= self.card.max_positions:
            return
        fields = ("prompt", "system_prompt", "cot_text")
        texts = {field: self.vocabulary.encode(getattr(job, field) or "") for field in fields}
        lengths = {field: len(ids) for field, ids in texts.items()}
        lengths["cot_token_ids"] = len(job.cot_token_ids or ())
        raise JobError(
            f"the sequence is too long ({length} tokens, limit {self.card.max_positions})",
            where=max(lengths, key=lambda field: lengths[field]),
            hint="shorten the texts, or give fewer source images",
            code="job.too-long",
        )
