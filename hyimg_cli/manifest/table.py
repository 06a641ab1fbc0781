"""CSV and TSV manifests: one job per record, after a first record with the column names.

A record's position is the line on which it begins, because its texts may contain line ends.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence

from hyimg_cli.errors import HyimgError
from hyimg_cli.files import MANIFEST_BYTES
from hyimg_cli.manifest.fields import BY_NAME
from hyimg_cli.manifest.line import Line, fault, plain_key
from hyimg_cli.spec.units import counted

DELIMITERS = {".csv": ",", ".tsv": "\t"}
# A first line by which a spreadsheet program is told the delimiter.
_SEPARATOR = re.compile(r'"?sep=([,;\t|])"?[ \t]*\r?\n', re.IGNORECASE)
# The kinds of cells that hold numbers.
_NUMBERS = ("int", "float", "low,high")


def read_table(
    data: bytes, title: str, delimiter: str, faults: list[HyimgError]
) -> Iterator[tuple[int, Line]]:
    """Yield the records of a file as lines, each with its number.

    Never raises for the contents. Faults that belong to no record are added to `faults`. Another
    delimiter is used if the file names one (`sep=;`), or if its first row has only that one.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        hint = 'save the table as UTF-8; in a spreadsheet program, choose "CSV UTF-8"'
        faults.append(fault("not-utf8", "the line is not UTF-8", f"{title}:{number}", hint))
        return
    if named := _SEPARATOR.match(text):
        delimiter, text = named[1], "\n" + text[named.end() :]
    else:
        head = text.lstrip().partition("\n")[0]
        found = [one for one in ",;\t" if one in head]
        delimiter = found[0] if len(found) == 1 else delimiter
    rows = _rows(text, title, delimiter, faults)
    number, header = next(rows, (1, []))
    columns = _columns(header, f"{title}:{number}", faults) if header else []
    if faults and "prompt" not in columns:  # a column's fault is in every row
        return
    is_empty, own = True, _own_names(header)
    for number, row in rows:
        names = _own_names(row)
        if names == own:  # tables were joined
            continue
        is_empty = False
        if "prompt" in names and len(names) > 1 and BY_NAME.keys() >= set(filter(None, names)):
            what = "the row names other columns than the first row; the rest was not read"
            hint = "put each table into a file of its own"
            faults.append(fault("bad-csv", what, f"{title}:{number}", hint))
            return
        line, cells = Line(f"{title}:{number}"), zip(columns, row, strict=False)
        # Cells in unknown columns are left out: the column name is the fault.
        texts = ((name, _with_points(name, text, delimiter)) for name, text in cells if name)
        line.read_fields(texts, are_cells=True)
        if beyond := sum(bool(text.strip()) for text in row[len(columns) :]):
            what = f"the row has {counted(beyond, 'cell')} too many"
            line.add("bad-csv", what, hint="put quotes around a cell that contains a comma")
        yield number, line
    if is_empty and not faults:
        faults.append(fault("empty", "the file has no jobs", title, "write one job per row"))


def _with_points(name: str, cell: str, delimiter: str) -> str:
    """Return a cell with numbers as 2.5, where a spreadsheet wrote 2,5.

    In a table with commas between its cells, a comma in a number is not a decimal separator, and
    1,000 may be a thousand unless semicolons are between them.
    """
    known = BY_NAME.get(name)
    if known is None or "," not in cell or known.kind.metavar not in _NUMBERS or delimiter == ",":
        return cell
    digits = r"\d+" if delimiter == ";" else r"(?!\d{3}(?!\d))\d+"
    whole = re.compile(rf"([+-]?\d*),({digits}(?:[eE][+-]?\d+)?)")
    parts = re.split(r"([\s;]+)", cell.strip())
    if len(parts) == 1 and known.kind.metavar == "low,high":
        return cell
    return "".join(whole.sub(r"\1.\2", one) if whole.fullmatch(one) else one for one in parts)


def _own_names(row: Sequence[str]) -> list[str]:
    """Return the names of columns as fields are written: `Custom ID` is custom_id.

    A table that was joined to others may begin with a byte order mark.
    """
    return [re.sub(r"[\s-]+", "_", name.strip("\ufeff \t").lower()) for name in row]


def _rows(
    text: str, title: str, delimiter: str, faults: list[HyimgError]
) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not empty, with the line on which it begins.

    Text after a quote that is never closed cannot be read: it ends the rows and is a fault.
    """
    most = csv.field_size_limit(MANIFEST_BYTES)
    number = 1
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        for row in reader:
            if any(cell.strip() for cell in row):
                yield number, row
            number = reader.line_num + 1
    except csv.Error as error:
        hint = 'write a cell that contains quotes "like ""this"""'
        what = f"not a valid record: {error}"
        faults.append(fault("bad-csv", what, f"{title}:{number}", hint))
    finally:
        csv.field_size_limit(most)


def _columns(row: Sequence[str], place: str, faults: list[HyimgError]) -> list[str | None]:
    """Return the field of each column; None for an unknown name."""
    # pandas names the column of its row numbers.
    named = [re.sub("Unnamed: [0-9]+", "", name.strip()) for name in row]
    # `Image` and `Custom ID` in a spreadsheet mean fields too.
    both = zip(_own_names(row), named, strict=True)
    names = [own if own in BY_NAME else name for own, name in both]
    if not any(name in BY_NAME for name in names):
        hint = "for example custom_id,prompt,images,seed"
        what = "the first row must name the columns"
        faults.append(fault("no-header", what, place, hint))
        return [None] * len(names)
    columns: list[str | None] = []
    header = Line(place)
    for name in names:
        known = BY_NAME.get(name)
        own = known.name if known else name
        column = own if known or name.startswith("x_") else None
        if column is None and name:  # spreadsheets leave columns without a name
            header.add_unknown(name)
        elif column in columns and name:
            column, what, hint = None, f"{own} is given twice", "remove one of the columns"
            header.add("duplicate-field", what, plain_key(name), hint)
        columns.append(column)
    header.end_unknown("columns")
    faults += header.faults
    return columns
