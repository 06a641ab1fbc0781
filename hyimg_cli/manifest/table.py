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


def read_table(
    data: bytes, title: str, delimiter: str, faults: list[HyimgError]
) -> Iterator[tuple[int, Line]]:
    """Yield the records of a file as lines, each with its number.

    Never raises for the contents. Faults that belong to no record are added to `faults`. In a CSV
    file, semicolons may replace commas, because spreadsheets write them where the decimal separator
    is a comma.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        hint = 'save the table as UTF-8; in a spreadsheet program, choose "CSV UTF-8"'
        faults.append(fault("not-utf8", "the line is not UTF-8", f"{title}:{number}", hint))
        return
    head = text.lstrip().partition("\n")[0]
    if delimiter == "," and "," not in head and ";" in head:
        delimiter = ";"
    rows = _rows(text, title, delimiter, faults)
    header = next(rows, None)
    columns = [] if header is None else _columns(header[1], f"{title}:{header[0]}", faults)
    if faults and "prompt" not in columns:  # a column's fault is in every row
        return
    records = list(rows)
    if not records and not faults:
        faults.append(fault("empty", "the file has no jobs", title, "write one job per row"))
    for number, row in records:
        line, named = Line(f"{title}:{number}"), zip(columns, row, strict=False)
        # Cells in unknown columns are left out: the column name is the fault.
        line.read_fields(((name, text) for name, text in named if name is not None), are_cells=True)
        if beyond := sum(bool(text.strip()) for text in row[len(columns) :]):
            what = f"the row has {counted(beyond, 'cell')} too many"
            line.add("bad-csv", what, hint="put quotes around a cell that contains a comma")
        yield number, line


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
    names = []
    for name in map(str.strip, row):
        # `Image` and `Custom ID` in a spreadsheet mean fields too.
        own = re.sub(r"[\s-]+", "_", name.lower())
        names.append(own if own in BY_NAME else name)
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
