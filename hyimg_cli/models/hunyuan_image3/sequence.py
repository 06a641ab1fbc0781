"""The token sequence of a job: AR prompts, and full layouts for the diffusion stage.

Both are built from the same sections, each encoded separately, so the AR stage's input is a literal
prefix of the diffusion stage's. No torch. Source: the official tokenizer wrapper; golden case 13
holds 32 of its layouts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hyimg_cli.kv.segments import Segment
from hyimg_cli.models.common.spans import Grid, cut_segments
from hyimg_cli.models.hunyuan_image3.config import Template
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary

Pair = tuple[str, str]
# Of the reasoning, and of the description of the picture.
_COT_TAGS: tuple[Pair, ...] = ("<think>", "</think>"), ("<recaption>", "</recaption>")


@dataclass(frozen=True)
class ImageBlock:
    """Image tokens `[start, stop)`: `grid.cells` with 2-D positions, then padding."""

    start: int
    stop: int
    grid: Grid


@dataclass(frozen=True)
class SourceShape:
    """The place of a source image: its bucket's ratio, VAE grid, ViT grid, slots."""

    ratio_index: int
    vae_grid: Grid
    vit_grid: Grid
    vit_slots: int


@dataclass(frozen=True)
class SourceBlock:
    """A source image's `<timestep>`, VAE tokens, ViT tokens (one separator between)."""

    timestep: int
    vae: ImageBlock
    vit: ImageBlock

    @property
    def start(self) -> int:
        """The index of its `<boi>`, which size, ratio and timestep follow."""
        return self.timestep - 3

    @property
    def stop(self) -> int:
        """Return the place after its `<eoi>`."""
        return self.vit.stop + 1


@dataclass(frozen=True)
class TargetBlock:
    """The place of the picture to draw; rows change from `live_start`, its `<timestep>`."""

    ratio: int
    live_start: int
    image: ImageBlock
    guidance: int | None = None
    timestep_r: int | None = None

    @property
    def special_count(self) -> int:
        """Count the live rows before the image tokens: one, or up to three if distilled."""
        return self.image.start - self.live_start


class Section(NamedTuple):
    """Ids that were encoded together.

    `is_replaceable`: the unconditional branch has `<cfg>` instead.
    """

    ids: tuple[int, ...]
    is_replaceable: bool = False


@dataclass(frozen=True)
class Layout:
    """A whole sequence: sections, image blocks, and spans with full attention.

    `cfg`: the unconditional branch's id for each token of a replaceable section.
    """

    sections: tuple[Section, ...]
    cfg: int
    sources: tuple[SourceBlock, ...]
    target: TargetBlock | None
    full_spans: tuple[tuple[int, int], ...]

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return _joined(section.ids for section in self.sections)

    @cached_property
    def unconditional_ids(self) -> tuple[int, ...]:
        sections = self.sections
        return _joined((self.cfg,) * len(ids) if replaced else ids for ids, replaced in sections)

    @property
    def length(self) -> int:
        return sum(len(section.ids) for section in self.sections)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Return where segments meet: before and after each source image, markers included."""
        return tuple(cut for source in self.sources for cut in (source.start, source.stop))

    @property
    def live_start(self) -> int:
        """Return the first row that every denoise step computes again."""
        assert self.target is not None, "only a picture's layout has live rows"
        return self.target.live_start

    @property
    def live_stop(self) -> int:
        """Return the place after the last row that the picture depends on."""
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
    """Return the sequence `ids[:stop]` as segments: texts, and source images named by digest."""
    images = {
        source.start: (digest, (source.vae.grid, source.vit.grid))
        for source, digest in zip(layout.sources, digests, strict=True)
    }
    return cut_segments(ids, layout.cuts, images, stop)


@dataclass(frozen=True)
class Target:
    """The picture to draw: ratio token index, token grid, whether distilled tokens appear."""

    ratio_index: int
    grid: Grid
    has_guidance: bool = False
    has_timestep_r: bool = False


class _Roles(NamedTuple):
    user: str
    assistant: str
    separator: str
    answer: str
    end_answer: str


_ROLES: dict[Template, _Roles] = {
    "instruct": _Roles("User: ", "Assistant: ", "\n\n", "<answer>", "</answer>"),
    "pretrain": _Roles("", "", "", "", ""),
}


def sections_of_text(
    words: Vocabulary, text: str, template: Template, *, drop_think: bool = False
) -> list[Section]:
    """Split a job's own text at its pairs of tags."""
    roles, (think, recaption) = _ROLES[template], _COT_TAGS
    tags = _Tags(think, recaption, (roles.answer, roles.end_answer), drop_think)
    return [Section(tuple(words.encode(part)), kind) for part, kind in _parts(text, tags)]


def sections_of_ids(
    words: Vocabulary, ids: Sequence[int], template: Template, *, drop_think: bool = False
) -> list[Section]:
    """Split a text of the AR stage, whose ids are kept, as `sections_of_text` splits a text."""
    roles = _ROLES[template]
    think, recaption = ((chr(first), chr(last)) for first, last in words.pairs)
    opening, closing = (_letters(words.encode(one)) for one in (roles.answer, roles.end_answer))
    tags = _Tags(think, recaption, (opening, closing), drop_think)
    return [Section(tuple(map(ord, part)), kind) for part, kind in _parts(_letters(ids), tags)]


class _Tags(NamedTuple):
    """Opening and closing tags, as text or as `_letters`; `drop_think`: leave reasoning out."""

    think: Pair
    recaption: Pair
    answer: Pair
    drop_think: bool


def _letters(ids: Iterable[int]) -> str:
    """Return ids as a text with one letter for each."""
    return "".join(map(chr, ids))


def _parts(text: str, tags: _Tags) -> list[tuple[str, bool]]:
    """Return a text's parts, each with whether it is replaceable: all but tags that form pairs.

    As upstream, reasoning is looked for first, even inside a recaption, and a text without any pair
    is one part in answer tags. NOTE: upstream splits at every tag of a kind, so it loses or doubles
    what is around a repeated one. Here nothing is lost, and later pairs are pairs, too.
    """
    parts = [part for part in _paired(text, (tags.think, tags.recaption), tags) if part[0]]
    if parts == [(text, True)]:
        opening, closing = tags.answer
        return [(opening + text + closing, True)]
    return parts


def _paired(text: str, pairs: Sequence[Pair], tags: _Tags) -> Iterator[tuple[str, bool]]:
    if not pairs:
        yield text, True
        return
    (opening, closing), *others = pairs
    at = 0
    while (start := text.find(opening, at)) >= 0:
        if (stop := text.find(closing, start + len(opening))) < 0:
            break
        yield from _paired(text[at:start], others, tags)
        if not (tags.drop_think and opening == tags.think[0]):
            yield opening, False
            yield text[start + len(opening) : stop], True
            yield closing, False
        at = stop + len(closing)
    yield from _paired(text[at:], others, tags)


class LayoutBuilder:
    """One sequence being assembled; every block records its absolute indices as it is added.

    `has_joint_source_span`: VAE and ViT tokens of a source attend to each other (as released).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        has_joint_source_span: bool,
        template: Template = "instruct",
    ) -> None:
        self._words, self._joint = vocabulary, has_joint_source_span
        self._roles = _ROLES[template]
        self._sections: list[Section] = []
        self._length = 0
        self._sources: list[SourceBlock] = []
        self._spans: list[tuple[int, int]] = []
        self._target: TargetBlock | None = None

    def prompt(
        self, user: str, system: str | None = None, sources: Sequence[SourceShape] = ()
    ) -> "LayoutBuilder":
        """Return everything before any thinking; no system section for an empty `system`."""
        self.fixed(self._words.bos)
        if system:
            self._text(system)
            self._text(self._roles.separator)
        self._text(self._roles.user)
        for source in sources:
            self.source(source)
        self._text(user, is_replaceable=True)
        self._text(self._roles.separator)
        return self

    def opening(self, tag: str | None) -> Layout:
        """Return the AR stage's prompt, ending in `tag`: "", "<think>" or "<recaption>".

        For None it ends where the next token is a ratio token. Role prefix and tag are encoded as
        one string, as upstream does.
        """
        if tag is None:
            tag = f"{self._roles.answer}<boi>{self._words.name(self._words.img_size)}"
        self._text(self._roles.assistant + tag)
        return self.layout()

    def picture(self, cot: Sequence[Section], target: Target) -> Layout:
        """Return the diffusion stage's sequence: prompt, written text, picture tokens, end."""
        self._text(self._roles.assistant)
        for section in cot:
            self.section(section)
        self._text(self._roles.answer)
        self.target(target)
        self._text(self._roles.end_answer)
        self._text(self._roles.separator)
        return self.layout()

    def section(self, section: Section) -> None:
        self._sections.append(section)
        self._length += len(section.ids)

    def fixed(self, *ids: int) -> int:
        """Add tokens of both branches; return the place of the first."""
        self.section(Section(ids))
        return self._length - len(ids)

    def source(self, shape: SourceShape) -> None:
        words = self._words
        self.fixed(words.boi, words.img_size, words.ratios[shape.ratio_index], words.timestep)
        vae = self._image(shape.vae_grid, shape.vae_grid.cells)
        self.fixed(words.joint_img_sep)
        vit = self._image(shape.vit_grid, shape.vit_slots)
        self.fixed(words.eoi)
        self._sources.append(SourceBlock(vae.start - 1, vae, vit))
        joint = [(vae.start, vit.stop)]
        self._spans += joint if self._joint else [(vae.start, vae.stop), (vit.start, vit.stop)]

    def target(self, target: Target) -> None:
        words = self._words
        self.fixed(words.boi, words.img_size, words.ratios[target.ratio_index])
        live_start = self.fixed(words.timestep)
        guidance = timestep_r = None
        if target.has_guidance:
            guidance = self._distilled(words.guidance)
        if target.has_timestep_r:
            timestep_r = self._distilled(words.timestep_r)
        image = self._image(target.grid, target.grid.cells)
        self.fixed(words.eoi)
        self._target = TargetBlock(live_start - 1, live_start, image, guidance, timestep_r)
        self._spans.append((image.start, image.stop))

    def layout(self) -> Layout:
        return Layout(
            sections=tuple(self._sections),
            cfg=self._words.cfg,
            sources=tuple(self._sources),
            target=self._target,
            full_spans=tuple(self._spans),
        )

    def _text(self, text: str, *, is_replaceable: bool = False) -> None:
        if text:
            self.section(Section(tuple(self._words.encode(text)), is_replaceable))

    def _distilled(self, id_: int | None) -> int:
        assert id_ is not None, "a distilled checkpoint's tokenizer has its tokens"
        return self.fixed(id_)

    def _image(self, grid: Grid, slots: int) -> ImageBlock:
        start = self._length
        self.section(_repeated(self._words.img, slots))
        return ImageBlock(start, self._length, grid)


@lru_cache(maxsize=64)  # Sequences share the thousands of tokens of an image.
def _repeated(id_: int, count: int) -> Section:
    return Section((id_,) * count)


def _joined(parts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    ids: list[int] = []
    for part in parts:
        ids += part
    return tuple(ids)
