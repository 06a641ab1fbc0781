"""From a job to its token sequences, for running it and for counting what it will cost; no
torch.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyimg_cli.cache.memo import Memo
from hyimg_cli.errors import JobError
from hyimg_cli.kv.segments import Segment, TextSegment
from hyimg_cli.manifest.cost import JobTokens
from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.common.tokenizer import refuse_unknown_ids
from hyimg_cli.models.family import ImageCheckpoint
from hyimg_cli.models.hunyuan_image3 import split
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
    Prompt,
    Section,
    SourceShape,
    Target,
    segments,
)
from hyimg_cli.models.hunyuan_image3.system_prompt import shipped_text, system_prompt
from hyimg_cli.models.hunyuan_image3.vocabulary import (
    RATIO_COUNT_BASE,
    RATIO_COUNT_INSTRUCT,
    Vocabulary,
)
from hyimg_cli.settings.run import ModelChoice, Quantization
from hyimg_cli.spec.card import Bucket, ModelCard, RankBytes
from hyimg_cli.spec.job import ImageJob, Size

if TYPE_CHECKING:
    from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
    from hyimg_cli.parallel.ranks import RankPool

# Tokens around the picture: tags, <boi>, size, ratio, timestep, the distilled pair, and the end.
_FRAME_TOKENS = 16
# Any text: only the tokens around it are counted.
_STAND_IN = "x"
# What one checkpoint keeps of sequences that it has built, and of what jobs share.
_LAYOUT_BYTES = 64_000_000
_SHARED_BYTES = 64_000_000


@dataclass(frozen=True)
class ArPrompt:
    """The prompt of the AR stage: the layout's tokens `[0, stop)`."""

    layout: Layout
    stop: int

    @property
    def ids(self) -> tuple[int, ...]:
        return self.layout.ids[: self.stop]


class Prompter(ImageCheckpoint):
    """Sequences for one checkpoint. Raises CheckpointError where its files are incomplete."""

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
        self.builder = LayoutBuilder(
            self.vocabulary, has_joint_source_span=self.arch.has_joint_source_span
        )
        self._layouts: Memo[Hashable, Layout] = Memo(_LAYOUT_BYTES, _layout_bytes)
        # By all that a job's sequences are made of but its prompt: in that alone the jobs of a
        # manifest mostly differ.
        self._shared: Memo[Hashable, Any] = Memo(_SHARED_BYTES, _shared_bytes)

    def memo_counts(self) -> dict[str, dict[str, int]]:
        """Look-ups by kind: tokens of whole sections, sequences."""
        return {
            "prompt_tokens": self.vocabulary.memo_counts(),
            "layouts": self._layouts.counts(),
        }

    def check(self, job: ImageJob) -> None:
        """Passes a job that this checkpoint can take, as far as its text tells; no file is read.

        Source images count as the smallest they can be. Raises JobError with the manifest's field
        in `where`; each distinct prompt is encoded once.
        """
        key = "least", self._without_prompt(job, len(job.images))
        length, parts = self._shared.get(key, lambda: self._beside_prompt(job))
        parts = {"prompt": len(self._prompt_ids(job))} | parts
        length += parts["prompt"]
        self._refuse_too_long(length, max(parts, key=lambda name: parts[name]))

    def _beside_prompt(self, job: ImageJob) -> tuple[int, dict[str, int]]:
        """The least tokens of a job beside its prompt, and those of its other texts by field."""
        system = self._system(job)
        is_rewritten = self._thinks_and_rewrites(self._given_ids(job))
        if job.writes_text:
            closing = self.script(job).closing_tag
            is_rewritten = job.bot_task != "recaption" and closing == self.vocabulary.end_recaption
        picture_system = self._picture_system(job, is_rewritten)
        cot_length = sum(len(section.ids) for section in self._given_cot(job))
        text = system if job.writes_text else picture_system
        system_length = len(self.vocabulary.encode(text)) if text else 0
        tag = trigger(job.bot_task) if job.writes_text else ""
        kind = bool(text), len(job.images), tag
        frame: int = self._shared.get(("frame", *kind), lambda: self._frame(*kind))
        parts: dict[str, int] = {}
        if job.system_prompt is not None:
            parts["system_prompt"] = system_length
        if cot_length:
            parts["cot_text" if job.cot_text is not None else "cot_token_ids"] = cot_length
        return frame + system_length + cot_length, parts

    def fit(self, height: int, width: int, *, is_ratio: bool = False) -> tuple[Bucket, str]:
        """The bucket for a picture, and a note where training left the nearest one out, else "".

        `is_ratio`: the note says a ratio, no pixels.
        """
        bucket = self.card.nearest_bucket(height, width)
        nearest = replace(self.card, buckets=official_buckets(self.arch)).nearest_bucket(
            height, width
        )
        if bucket == nearest:
            return bucket, ""
        known = ", ".join(str(b.size) for b in self.card.buckets)
        asked = f"{width}{':' if is_ratio else 'x'}{height}"
        return bucket, f"{asked} fitted to {bucket.size}: {self.card.name} knows {known}"

    def source_shape(self, bucket: Bucket, vit_grid: Grid) -> SourceShape:
        """The place that a source image fitted to `bucket` takes in the sequence."""
        vae_grid = Grid(*self.card.latent_grid(bucket.size))
        return SourceShape(bucket.ratio_index, vae_grid, vit_grid, self.card.source_vit_tokens)

    def opening(self, job: ImageJob, shapes: Sequence[SourceShape]) -> ArPrompt | None:
        """The prompt of the AR stage; None where it has nothing to write or to decide.

        A job that writes text opens with its trigger tag; one that only needs a ratio is fed all
        that comes before the ratio token.
        """
        prompt = self._prompt(job, shapes, self._system(job))
        if job.writes_text:
            layout = self._text(prompt, trigger(job.bot_task))
            return ArPrompt(layout, len(layout.ids))
        if not job.size.is_auto:
            return None
        if job.cot_text is None and job.cot_token_ids is None:
            layout = self._text(prompt, self.builder.ratio_trigger(self.template))
            return ArPrompt(layout, len(layout.ids))
        layout = self.picture(job, shapes, None, self.card.buckets[0])
        assert layout.target is not None, "a picture's layout has a target"
        return ArPrompt(layout, layout.target.ratio)

    def picture(
        self,
        job: ImageJob,
        shapes: Sequence[SourceShape],
        written: Sequence[int] | None,
        bucket: Bucket,
    ) -> Layout:
        """The diffusion stage's sequence, with the text that the AR stage wrote or the job gave."""
        if written is None:
            cot, ids = self._given_cot(job), self._given_ids(job)
        else:
            cot, ids = self.builder.cot_from_ids(written, drop_think=job.drop_think), written
        system = self._picture_system(job, self._thinks_and_rewrites(ids))
        prompt = self._prompt(job, shapes, system)
        key = prompt, tuple(cot), self.target(bucket)
        layout = self._layouts.get(key, lambda: self.builder.image(prompt, cot, key[2]))
        self._refuse_too_long(layout.live_start)
        return layout

    def target(self, bucket: Bucket) -> Target:
        """The picture's tokens for a bucket."""
        grid = Grid(*self.card.latent_grid(bucket.size))
        return Target(
            bucket.ratio_index,
            grid,
            has_guidance=self.arch.cfg_distilled,
            has_timestep_r=self.arch.use_meanflow,
        )

    def script(self, job: ImageJob) -> Script:
        """The rules of the job's AR stage."""
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
        """Ids of the ratio tokens that the checkpoint may choose."""
        return tuple(self.vocabulary.ratios[bucket.ratio_index] for bucket in self.card.buckets)

    def text_budget(self, job: ImageJob, opening_length: int) -> int:
        """Number of tokens the AR stage may write: the job's limit, within the model's positions.

        Room for a picture is left where there is any.
        """
        bucket = self.card.bucket_of(job.size) or self.card.nearest_bucket(1, 1)
        room = self.card.max_positions - opening_length - _FRAME_TOKENS
        if room < 1:
            self._refuse_too_long(opening_length + _FRAME_TOKENS + 1)
        beside_picture = room - self.target(bucket).grid.cells
        return min(job.text.max_new_tokens, beside_picture if beside_picture > 0 else room)

    def branch_count(self, job: ImageJob) -> int:
        """Guidance branches of a job: distilled networks, and scales up to 1, have one."""
        return 2 if job.guidance_scale > 1 and not self.card.is_distilled else 1

    def prefixes(
        self, job: ImageJob, source_sizes: Sequence[Size], digests: Sequence[str]
    ) -> list[list[Segment]]:
        user, shapes = self._prompt_ids(job), self._shapes(source_sizes)
        key = "opening", self._without_prompt(job, shapes)
        opening = self._shared.get(key, lambda: self.opening(_stand_in(job), shapes))
        if opening is not None:
            layout: Layout = opening.layout
            rows, stop = [(layout.ids, user)], opening.stop - 1
        else:
            bucket = self.fit(job.size.height, job.size.width)[0]
            # Kept as long as any sequence: the stand-in's prompt is that of all.
            layout = self.picture(_stand_in(job), shapes, None, bucket)
            without = layout.unconditional_ids, [self.vocabulary.cfg] * len(user)
            rows = [(layout.ids, user), without][: self.branch_count(job)]
            stop = layout.live_start - 1
        # The segments up to the last source are equal in all these jobs, whatever their prompts.
        (start, end), behind = layout.user, max((0, *layout.cuts))
        first: list[Segment] = self._shared.get(
            ("sources", self._without_prompt(job, shapes), tuple(digests)),
            lambda: segments(layout, layout.ids, digests, behind),
        )
        found = []
        for row, text in rows:
            ids = (*row[behind:start], *text, *row[end:stop])
            found.append([*first, TextSegment(ids)] if ids else first)
        return found

    def _shapes(self, source_sizes: Sequence[Size]) -> tuple[SourceShape, ...]:
        return tuple(map(self._shape, source_sizes))

    def _shape(self, size: Size) -> SourceShape:
        """Of a picture that is not read: the real patch grid only shapes positions, every count is
        the same with any.
        """
        return self._shared.get(
            ("shape", size),
            lambda: self.source_shape(self.fit(size.height, size.width)[0], Grid(1, 1)),
        )

    def _without_prompt(self, job: ImageJob, sources: Hashable) -> Hashable:
        return (
            *(sources, job.bot_task, job.size, self.branch_count(job)),
            *(job.use_system_prompt, self._system(job), job.drop_think),
            *(job.cot_text, job.cot_token_ids),
        )

    def count(self, job: ImageJob, source_sizes: Sequence[Size], assumed_think: int) -> JobTokens:
        """Tokens that the job will take; text not yet written counts as `assumed_think` tokens."""
        shapes = self._shapes(source_sizes)
        key = "tokens", assumed_think, self._without_prompt(job, shapes)
        found: JobTokens = self._shared.get(
            key, lambda: self._counted(_stand_in(job), shapes, assumed_think)
        )
        more = len(self._prompt_ids(job)) - len(self.vocabulary.encode(_STAND_IN))
        self._refuse_too_long(found.positive + more)
        return found._replace(
            ar_prefill=found.ar_prefill and found.ar_prefill + more,
            positive=found.positive + more,
            negative=found.negative and found.negative + more,
        )

    def _counted(
        self, job: ImageJob, shapes: Sequence[SourceShape], assumed_think: int
    ) -> JobTokens:
        opening = self.opening(job, shapes)
        bucket = self.card.bucket_of(job.size) or self.card.nearest_bucket(1, 1)
        text = [self.vocabulary.cfg] * assumed_think
        layout = self.picture(job, shapes, text if job.writes_text else None, bucket)
        branches, prefix = self.branch_count(job), layout.live_start
        return JobTokens(
            ar_prefill=opening.stop if opening else 0,
            shared_prefix=layout.shared_length if branches > 1 else 0,
            positive=prefix,
            negative=prefix if branches > 1 else 0,
            step_rows=layout.live_stop - prefix,
            branches=branches,
            image_encodes=len(shapes),
            assumed_think=assumed_think if job.writes_text else 0,
        )

    def refuse_uneven(self, ranks: int, quantization: Quantization) -> None:
        split.refuse_uneven(self.arch, ranks, quantization)

    def rank_bytes(self, ranks: int, dtype: str, quantization: Quantization) -> RankBytes:
        weights, arch = self.card.weights, self.arch
        return split.rank_bytes(weights, arch, ranks, dtype=dtype, quantization=quantization)

    def load(
        self, choice: ModelChoice, *, is_batch_invariant: bool, pool: "RankPool | None"
    ) -> "HunyuanImage3":
        from hyimg_cli.models.hunyuan_image3.family import load_family  # imports torch

        return load_family(self, choice, is_batch_invariant=is_batch_invariant, pool=pool)

    def _prompt_ids(self, job: ImageJob) -> list[int]:
        """The prompt's ids. Raises JobError for a control token in it."""
        ids = self.vocabulary.encode(job.prompt)
        self.vocabulary.refuse_control("prompt", ids)
        return ids

    def _text(self, prompt: Prompt, trigger: str) -> Layout:
        return self._layouts.get((prompt, trigger), lambda: self.builder.text(prompt, trigger))

    def _frame(self, has_system: bool, source_count: int, tag: str) -> int:
        """Positions that a sequence takes at least beside its texts: up to the live rows, or, where
        `tag` opens a text to write, up to its first token with room for the rest.
        """
        smallest = min(self.card.buckets, key=lambda b: Grid(*self.card.latent_grid(b.size)).cells)
        shape = self.source_shape(smallest, Grid(1, 1))
        system = _STAND_IN if has_system else None
        prompt = Prompt("", system, (shape,) * source_count, self.template)
        stand_in = len(self.vocabulary.encode(_STAND_IN)) if has_system else 0
        if tag:
            return len(self.builder.text(prompt, tag).ids) + _FRAME_TOKENS + 1 - stand_in
        return self.builder.image(prompt, [], self.target(smallest)).live_start - stand_in

    def _prompt(self, job: ImageJob, shapes: Sequence[SourceShape], system: str | None) -> Prompt:
        self._prompt_ids(job)
        return Prompt(job.prompt, system, tuple(shapes), self.template)

    def _system(self, job: ImageJob) -> str | None:
        return system_prompt(
            job.use_system_prompt,
            custom=job.system_prompt,
            bot_task=job.bot_task,
            folder=self.folder,
        )

    def _picture_system(self, job: ImageJob, is_rewritten: bool) -> str | None:
        """Without the reasoning before it, a rewritten text is the work of the recaption prompt.

        As upstream, which does not strip that one text: its line breaks are tokens.
        """
        system = self._system(job)
        if system and job.drop_think and is_rewritten:
            return shipped_text(self.folder, "en_recaption", field="drop_think")
        return system

    def _thinks_and_rewrites(self, ids: Sequence[int]) -> bool:
        words = self.vocabulary
        return words.think in ids and words.recaption in ids

    def _given_ids(self, job: ImageJob) -> Sequence[int]:
        """Of the text that the job gives, its reasoning included."""
        if job.cot_token_ids is not None:
            return job.cot_token_ids
        return self.vocabulary.encode(job.cot_text) if job.cot_text is not None else ()

    def _given_cot(self, job: ImageJob) -> list[Section]:
        if job.cot_token_ids is not None:
            refuse_unknown_ids(job.cot_token_ids, self.card.vocab_size)
            return self.builder.cot_from_ids(job.cot_token_ids, drop_think=job.drop_think)
        if job.cot_text is None:
            return []
        sections = self.builder.cot_from_text(
            job.cot_text, template=self.template, drop_think=job.drop_think
        )
        ids = [id_ for section in sections for id_ in section.ids]
        words = self.vocabulary
        allowed = {*words.tags, words.answer, words.end_answer}
        words.refuse_control("cot_text", ids, allowed=allowed)
        return sections

    def _refuse_too_long(self, length: int, field: str = "") -> None:
        if length > self.card.max_positions:
            raise JobError(
                f"the sequence has {length} tokens, the model {self.card.max_positions} positions",
                where=field,
                hint="shorten its texts, or give fewer source images",
                code="job.too-long",
            )


def _stand_in(job: ImageJob) -> ImageJob:
    """The job with any prompt."""
    return replace(job, prompt=_STAND_IN)


def _layout_bytes(layout: Layout) -> int:
    # Two tuples of ids; the sections and blocks beside them are few.
    return 512 + 2 * 8 * len(layout.ids)


def _shared_bytes(found: Any) -> int:
    if isinstance(found, ArPrompt):
        return _layout_bytes(found.layout)
    return 1024 + (8 * sum(part.length for part in found) if isinstance(found, list) else 0)
