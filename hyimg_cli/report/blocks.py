"""What a page is made of. Every text is plain: the page escapes it.

    Page(title, question, Verdict(…), sections=(Section("Time", blocks=(Bars(…), Table(…))), …))

`report.page.render` turns it into HTML. A new kind of block is a class here, a line in `Block` and
a macro of the name `kind` in templates/blocks.html.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hyimg_cli.report.pictures import HeatMap, Picture

Tone = Literal["good", "bad", "neutral"]
Fact = tuple[str, str]
Align = Literal["left", "right"]


@dataclass(frozen=True)
class Verdict:
    """The answer first: a word or a few, in the colour of its tone, then the reasons."""

    name: str
    tone: Tone = "neutral"
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Span:
    """A measured value with its spread, where there is one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Bar:
    """One row of bars: a `Span` for each series, None where a series has no such thing."""

    label: str
    spans: tuple[Span | None, ...]


@dataclass(frozen=True)
class Bars:
    """Values as lengths from a common zero: a row for each phase, a bar in it for each series.

    `caption` says what was measured and how often; `unit` stands behind every number.
    """

    kind: ClassVar[str] = "bars"
    caption: str
    series: tuple[str, ...]
    rows: tuple[Bar, ...]
    unit: str = "s"

    @property
    def top(self) -> float:
        """The value that the longest bar or whisker ends at."""
        spans = [span for row in self.rows for span in row.spans if span is not None]
        return max((max(span.value, span.high or 0.0) for span in spans), default=0.0)

    def percent(self, value: float) -> str:
        """How far a value reaches, as a CSS length."""
        return f"{max(value, 0.0) / self.top * 100 if self.top else 0:.3f}%"

    def text(self, span: Span) -> str:
        """The value and its spread in words."""
        numbers = f"{span.value:.3g} {self.unit}"
        if span.low is None or span.high is None:
            return numbers
        return f"{numbers} ({span.low:.3g} to {span.high:.3g})"


@dataclass(frozen=True)
class Compare:
    """Two pictures of one size side by side, one over the other behind a slider, and where they
    differ. `facts`: numbers of the pair, such as ("PSNR", "31.2 dB").
    """

    kind: ClassVar[str] = "compare"
    title: str
    before: Picture
    after: Picture
    heat: HeatMap | None = None
    facts: tuple[Fact, ...] = ()
    before_label: str = "A"
    after_label: str = "B"


@dataclass(frozen=True)
class Gallery:
    """Pictures in a row that wraps, each with its caption."""

    kind: ClassVar[str] = "gallery"
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Row:
    """A row of a table; one that matters most may have a tone."""

    cells: tuple[str, ...]
    tone: Tone | None = None


@dataclass(frozen=True)
class Table:
    """A table: the first column names the row. `aligns`: of each column; default: numbers right."""

    kind: ClassVar[str] = "table"
    caption: str
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    aligns: tuple[Align, ...] = ()

    def align(self, column: int) -> Align:
        """How a column is set."""
        if self.aligns:
            return self.aligns[column]
        return "left" if column == 0 else "right"


@dataclass(frozen=True)
class Facts:
    """Names and values, such as the environment."""

    kind: ClassVar[str] = "facts"
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Commands:
    """Command lines to copy."""

    kind: ClassVar[str] = "commands"
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Card:
    """One job: its pictures, what was asked, labelled texts, short facts, and texts that fold."""

    title: str
    pictures: tuple[Picture, ...] = ()
    text: str = ""
    texts: tuple[Fact, ...] = ()
    facts: tuple[Fact, ...] = ()
    details: tuple[Fact, ...] = ()
    problems: tuple[str, ...] = ()
    tone: Tone = "neutral"


@dataclass(frozen=True)
class Cards:
    """Jobs as a grid of cards."""

    kind: ClassVar[str] = "cards"
    cards: tuple[Card, ...]


Block = Bars | Compare | Gallery | Table | Facts | Commands | Text | Cards


@dataclass(frozen=True)
class Section:
    """A headed part of a page."""

    title: str
    blocks: tuple[Block, ...]
    intro: str = ""


@dataclass(frozen=True)
class Page:
    """A page: the question, the verdict, and the parts that show where it comes from.

    `stamp`: anything that tells whether the page is still that of its data; it is not shown.
    """

    title: str
    question: str
    verdict: Verdict
    sections: tuple[Section, ...]
    footer: str = ""
    stamp: str = ""
