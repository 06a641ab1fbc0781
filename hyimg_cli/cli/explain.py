"""`hyimg explain`: what error codes mean, from the pages of errors that ship with the package."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli import packaged, render
from hyimg_cli.errors import UsageError
from hyimg_cli.settings.values import nearest

# As messages show a code: error[job.size].
_SHOWN = re.compile(r"(?:\w+)?\[([^\]]*)\]?:?")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#]*)(#[^)]*)?\)")


@dataclass(frozen=True)
class Row:
    """A row of the pages: a code, why it happens and what to do. `page` is a file name."""

    code: str
    cause: str
    remedy: str
    group: str
    page: str


def _codes(incomplete: str) -> list[str]:
    return [code for code in _rows() if code.startswith(incomplete)]


def explain(
    codes: list[str] = typer.Argument(
        None,
        metavar="CODE",
        show_default=False,
        autocompletion=_codes,
        help="Codes as messages show them, or the word that they begin with.",
    ),
    as_json: bool = o.AS_JSON,
) -> None:
    """Explain an error code: its cause, and what to do. Without a code, list all codes."""
    rows = _rows()
    found = [row for code in codes or () for row in _meant(code, rows)]
    if as_json:
        for row in found or rows.values():
            render.json_line(asdict(row))
    elif found:
        for row in found:
            render.line(f"{row.code}: {row.cause}")
            render.line(f"  to do: {row.remedy}")
    else:
        _list(rows.values())


def _meant(word: str, rows: Mapping[str, Row]) -> list[Row]:
    """Return the row of a code, or the rows of all codes that begin with the word."""
    shown = _SHOWN.fullmatch(word.strip())
    code = (shown[1] if shown else word).strip(" .:`").lower()
    if code in rows:
        return [rows[code]]
    if group := [row for name, row in rows.items() if name.startswith(f"{code}.")]:
        return group
    ending = [name for name in rows if name.rpartition(".")[2] == code.rpartition(".")[2]]
    close = ending or [one for one in (nearest(code, rows),) if one]
    hint = f"did you mean {' or '.join(close[:3])}?" if close else "hyimg explain lists all codes"
    raise UsageError(f"{word} is not an error code", hint=hint, code="usage.explain")


def _list(rows: Iterable[Row]) -> None:
    group = ""
    for row in rows:
        if row.group != group:
            render.line(f"\n{row.group}" if group else row.group)
            group = row.group
        render.line(f"  {row.code}")


@cache
def _rows() -> dict[str, Row]:
    """Return the row of each code, in the order of the pages."""
    found = dict[str, Row]()
    for path in sorted(packaged.folder("docs").glob("errors-*.md")):
        group = ""
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("## "):
                group = line[3:]
            elif line.startswith("| `"):
                codes, cause, remedy = (_plain(cell) for cell in line.strip("| ").split(" | "))
                for code in codes.split():
                    found[code] = Row(code, cause, remedy, group, path.name)
    return found


def _plain(text: str) -> str:
    """Return a cell without marks; a link is followed by the page of its target."""
    text = _LINK.sub(lambda link: f"{link[1]} (docs/{link[2]})" if link[2] else link[1], text)
    return text.replace("`", "")
