"""The token sequence of one job: prompts for the AR stage, full layouts for the diffusion stage.

Both are built from the same sections, each encoded on its own, so that what the AR stage was fed is
a literal prefix of what the diffusion stage sees. No torch. Source: the official tokenizer wrapper;
golden case 13 holds 32 of its layouts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hyimg_cli.kv.segments import ImageSegment, Segment, TextSegment
from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.hunyuan_image3.config import Template
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary

_COT_PARTS = re.compile(r"<(think|recaption)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class ImageBlock:
    """Image tokens `[start, stop)`; the first `grid.cells` carry 2-D positions, the rest are
    padding.
    """

    start: int
    stop: int
    grid: Grid


@dataclass(frozen=True)
class SourceShape:
    """The place that a source image takes: its bucket's ratio, VAE grid, ViT grid and
    slots.
    """

    ratio_index: int
    vae_grid: Grid
    vit_grid: Grid
    vit_slots: int


@dataclass(frozen=True)
class SourceBlock:
    """Where a source image stands: its `<timestep>`, VAE tokens, ViT tokens (one separator
    between).
    """

    timestep: int
    vae: ImageBlock
    vit: ImageBlock

    @property
    def start(self) -> int:
        """Its `<boi>`: then come size, ratio and timestep."""
        return self.timestep - 3

    @property
    def stop(self) -> int:
        """Behind its `<eoi>`."""
        return self.vit.stop + 1


@dataclass(frozen=True)
class TargetBlock:
    """Where the picture to draw stands. `live_start` is its `<timestep>`: from there on rows
    change.
    """

    ratio: int
    live_start: int
    image: ImageBlock
    guidance: int | None = None
    timestep_r: int | None = None

    @property
    def special_count(self) -> int:
        """Live rows before the image tokens: timestep, and guidance and timestep_r where
        distilled.
        """
        return self.image.start - self.live_start


@dataclass(frozen=True)
class Section:
    """Ids that were encoded together. `is_replaceable`: the unconditional branch has `<cfg>`
    here.
    """

    ids: tuple[int, ...]
    is_replaceable: bool = False


@dataclass(frozen=True)
class Layout:
    """A whole sequence: ids of both branches, image blocks, and spans that see each other fully.

    `shared_length` is the index of the first token that the unconditional branch has replaced, or
    the length where none is: everything before it is equal in both branches. `user`: where the
    user's text begins and ends, behind every source.
    """

    ids: tuple[int, ...]
    unconditional_ids: tuple[int, ...]
    shared_length: int
    sources: tuple[SourceBlock, ...]
    target: TargetBlock | None
    full_spans: tuple[tuple[int, int], ...]
    user: tuple[int, int] = (0, 0)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where segments meet: before and behind each source image, markers included."""
        return tuple(cut for source in self.sources for cut in (source.start, source.stop))

    @property
    def live_start(self) -> int:
        """Where the rows begin that every denoise step computes anew."""
        assert self.target is not None, "only a picture's layout has live rows"
        return self.target.live_start

    @property
    def live_stop(self) -> int:
        """Behind the last row that the picture depends on."""
        assert self.target is not None, "only a picture's layout has live rows"
        return self.target.image.stop

    @property
    def image_blocks(self) -> tuple[ImageBlock, ...]:
        """Every block with 2-D positions, in order."""
        blocks = [block for source in self.sources for block in (source.vae, source.vit)]
        return tuple(blocks + ([self.target.image] if self.target else []))


def segments(
    layout: Layout, ids: Sequence[int], digests: Sequence[str], stop: int
) -> list[Segment]:
    """The sequence `ids[:stop]` as segments: runs of text, and source images named by digest."""
    found: list[Segment] = []
    at = 0
    for source, digest in zip(layout.sources, digests, strict=True):
        if source.stop > stop:
            break
        if at < source.start:
            found.append(TextSegment(tuple(ids[at : source.start])))
        grids = tuple((block.grid.rows, block.grid.columns) for block in (source.vae, source.vit))
        found.append(ImageSegment(tuple(ids[source.start : source.stop]), digest, grids))
        at = source.stop
    if at < stop:
        found.append(TextSegment(tuple(ids[at:stop])))
    return found


@dataclass(frozen=True)
class Target:
    """The picture to draw: ratio token index, token grid, and whether the distilled tokens
    appear.
    """

    ratio_index: int
    grid: Grid
    has_guidance: bool = False
    has_timestep_r: bool = False


@dataclass(frozen=True)
class Prompt:
    """A job before any thinking. `system` empty or None: no system section at all."""

    user: str
    system: str | None = None
    sources: tuple[SourceShape, ...] = ()
    template: Template = "instruct"


class LayoutBuilder:
    """Builds sequences for one vocabulary. `has_joint_source_span`: VAE and ViT tokens of a source
    see each other (the released setting)."""

    def __init__(self, vocabulary: Vocabulary, *, has_joint_source_span: bool) -> None:
        self.vocabulary = vocabulary
        self._joint = has_joint_source_span

    def text(self, prompt: Prompt, trigger: str) -> Layout:
        """The AR stage's prompt, ending in `trigger`: "" or "<think>", "<recaption>", or what
        `ratio_trigger` returns. Role prefix and trigger are encoded as one string, as upstream
        does.
        """
        draft = self._prompted(prompt)
        draft.text(_ROLES[prompt.template].assistant + trigger)
        return draft.layout()

    def ratio_trigger(self, template: Template) -> str:
        """The text behind which the next token is a ratio token."""
        size = self.vocabulary.name(self.vocabulary.img_size)
        return _ROLES[template].answer + "<boi>" + size

    def image(self, prompt: Prompt, cot: Sequence[Section], target: Target) -> Layout:
        """The diffusion stage's whole sequence: prompt, written text, the picture's tokens, the
        end.
        """
        roles, draft = _ROLES[prompt.template], self._prompted(prompt)
        draft.text(roles.assistant)
        for section in cot:
            draft.section(section)
        draft.text(roles.answer)
        draft.target(target)
        draft.text(roles.end_answer)
        draft.text(roles.separator)
        return draft.layout()

    def cot_from_text(
        self, text: str, *, template: Template, drop_think: bool = False
    ) -> list[Section]:
        """Sections of a written text, split at its tags; text outside the tags is its own section.

        Without any closed pair of tags the whole is one replaceable section, wrapped in answer tags
        by the instruct template.
        """
        matches = list(_COT_PARTS.finditer(text))
        if not matches:
            roles = _ROLES[template]
            return self._plain(roles.answer + text + roles.end_answer)
        sections: list[Section] = []
        end = 0
        for match in matches:
            sections += self._plain(text[end : match.start()])
            end = match.end()
            if not (drop_think and match[1] == "think"):
                opening, closing = (
                    Section(tuple(self.vocabulary.encode(tag)))
                    for tag in (f"<{match[1]}>", f"</{match[1]}>")
                )
                sections += [opening, *self._plain(match[2]), closing]
        return sections + self._plain(text[end:])

    def cot_from_ids(self, ids: Sequence[int], *, drop_think: bool = False) -> list[Section]:
        """Sections of text that the AR stage wrote, by its own ids: tags kept, the rest
        replaceable.
        """
        words, kept, is_thinking = self.vocabulary, [], False
        for id_ in ids:
            is_thinking = is_thinking or (drop_think and id_ == words.think)
            if not is_thinking:
                kept.append(Section((id_,), is_replaceable=id_ not in words.tags))
            is_thinking = is_thinking and id_ != words.end_think
        return kept

    def _plain(self, text: str) -> list[Section]:
        ids = tuple(self.vocabulary.encode(text))
        return [Section(ids, is_replaceable=True)] if ids else []

    def _prompted(self, prompt: Prompt) -> "Draft":
        roles, draft = _ROLES[prompt.template], Draft(self.vocabulary, self._joint)
        draft.section(Section((self.vocabulary.bos,)))
        if prompt.system:
            draft.text(prompt.system)
            draft.text(roles.separator)
        draft.text(roles.user)
        for source in prompt.sources:
            draft.source(source)
        draft.user(prompt.user)
        draft.text(roles.separator)
        return draft


@dataclass(frozen=True)
class _Roles:
    user: str
    assistant: str
    separator: str
    answer: str
    end_answer: str


_ROLES: dict[Template, _Roles] = {
    "instruct": _Roles("User: ", "Assistant: ", "\n\n", "<answer>", "</answer>"),
    "pretrain": _Roles("", "", "", "", ""),
}


class Draft:
    """A sequence being put together; every block notes its absolute indices as it is added."""

    def __init__(self, vocabulary: Vocabulary, has_joint_source_span: bool) -> None:
        self._vocabulary = vocabulary
        self._joint = has_joint_source_span
        self._ids: list[int] = []
        self._unconditional: list[int] = []
        self._sources: list[SourceBlock] = []
        self._spans: list[tuple[int, int]] = []
        self._target: TargetBlock | None = None
        self._user = 0, 0

    def user(self, text: str) -> None:
        start = len(self._ids)
        self.text(text, is_replaceable=True)
        self._user = start, len(self._ids)

    def text(self, text: str, *, is_replaceable: bool = False) -> None:
        if text:
            self.section(Section(tuple(self._vocabulary.encode(text)), is_replaceable))

    def section(self, section: Section) -> None:
        self._ids += section.ids
        replaced = (self._vocabulary.cfg,) * len(section.ids)
        self._unconditional += replaced if section.is_replaceable else section.ids

    def source(self, shape: SourceShape) -> None:
        words = self._vocabulary
        self._fixed(words.boi, words.img_size, words.ratios[shape.ratio_index], words.timestep)
        vae = self._image(shape.vae_grid, shape.vae_grid.cells)
        self._fixed(words.joint_img_sep)
        vit = self._image(shape.vit_grid, shape.vit_slots)
        self._fixed(words.eoi)
        self._sources.append(SourceBlock(vae.start - 1, vae, vit))
        joint = [(vae.start, vit.stop)]
        self._spans += joint if self._joint else [(vae.start, vae.stop), (vit.start, vit.stop)]

    def target(self, target: Target) -> None:
        words = self._vocabulary
        self._fixed(words.boi, words.img_size, words.ratios[target.ratio_index])
        live_start = len(self._ids)
        self._fixed(words.timestep)
        guidance = self._optional(words.guidance, target.has_guidance)
        timestep_r = self._optional(words.timestep_r, target.has_timestep_r)
        image = self._image(target.grid, target.grid.cells)
        self._fixed(words.eoi)
        self._target = TargetBlock(live_start - 1, live_start, image, guidance, timestep_r)
        self._spans.append((image.start, image.stop))

    def layout(self) -> Layout:
        pairs = zip(self._ids, self._unconditional, strict=True)
        different = (index for index, (a, b) in enumerate(pairs) if a != b)
        return Layout(
            ids=tuple(self._ids),
            unconditional_ids=tuple(self._unconditional),
            shared_length=next(different, len(self._ids)),
            sources=tuple(self._sources),
            target=self._target,
            full_spans=tuple(self._spans),
            user=self._user,
        )

    def _fixed(self, *ids: int) -> None:
        self.section(Section(ids))

    def _optional(self, id_: int | None, is_wanted: bool) -> int | None:
        if not is_wanted:
            return None
        assert id_ is not None, "a distilled checkpoint's tokenizer has its tokens"
        self._fixed(id_)
        return len(self._ids) - 1

    def _image(self, grid: Grid, slots: int) -> ImageBlock:
        start = len(self._ids)
        self._fixed(*([self._vocabulary.img] * slots))
        return ImageBlock(start, start + slots, grid)
