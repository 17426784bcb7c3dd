"""Read CSV files with quoted headers, several encodings and the variants of spreadsheets, with uniform errors.

Every layer may import it, except the pure ones (``domain``, ``perf``, ``accounting``, ``policies``).
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from joulery.domain.errors import DataError

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_OTHER_FILES = (
    (b"PK\x03\x04", "a workbook or an archive", "in a spreadsheet: save it as CSV UTF-8"),
    (b"\xd0\xcf\x11\xe0", "a workbook", "in a spreadsheet: save it as CSV UTF-8"),
    (b"\x1f\x8b", "compressed", "gunzip it first"),
    (b"PAR1", "Parquet", "this input is read from CSV alone"),
)
"""First bytes of file formats that are mistaken for CSV, what the file is, and a hint for the user."""
_SEPARATOR_LINE = re.compile(r"\s*sep=(.)\s*", re.IGNORECASE)
"""The line before the header by which a spreadsheet names its separator."""
_NUMBER = re.compile(r"\s*[-+]?\d+(,\d+)?([eE][-+]?\d+)?\s*")
_THOUSANDS = re.compile(r"\s*[-+]?[1-9]\d{0,2},\d{3}\s*")
_NO_NUMBER = frozenset({"", "nan", "na", "n/a", "null", "none", "-"})


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV file in memory.

    Attributes:
        file: The file.
        header: Names of its columns, stripped.
        lines: Line number (1-based, the last one of a cell with line breaks) and cells of each row; an empty line, or
            one of empty cells, has no cells; a row may be shorter or longer than the header.
    """

    file: Path
    header: tuple[str, ...]
    lines: Sequence[tuple[int, list[str]]]

    def require(self, columns: Iterable[str]) -> None:
        """Check that the table has columns.

        Raises:
            DataError: One is missing.
        """
        require_columns(columns, self.header, self.file)


def read_csv(file: Path, *, separators: str = ",;\t", lenient: bool = False) -> CsvTable:
    """Read a CSV file: UTF-8 or UTF-16, with or without a byte order mark, whose first row names the columns.

    Variants of spreadsheets are read too: where the separator is not a comma, decimal commas of a column of numbers
    become decimal points, unless all of its commas may separate thousands; empty last columns are left out.

    Args:
        file: The file.
        separators: Separators to choose from; the most frequent one of the header is used, unless a line ``sep=;``
            precedes it. With ``|`` nothing is quoted.
        lenient: Read undecodable bytes and unbalanced quotes as they are instead of refusing them.

    Raises:
        DataError: The file cannot be read, is not text or not CSV, or two columns have the same name.
    """
    text = _text(file, lenient=lenient)
    first = text.partition("\n")[0]
    named = None if lenient else _SEPARATOR_LINE.fullmatch(first)
    separator = named[1] if named else max(separators, key=first.count)
    quoting: Literal[0, 3] = csv.QUOTE_NONE if separator == "|" else csv.QUOTE_MINIMAL
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, quoting=quoting, strict=not lenient)
    try:
        if named:
            next(reader, None)
        header = tuple(name.strip() for name in next(reader, []))
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", file=str(file), row=reader.line_num) from None
    if not lenient:
        header, lines = _without_empty_cells(header, lines)
        if separator != ",":
            _point_decimals(header, lines)
    require_unique(header, file)
    return CsvTable(file, header, lines)


def _without_empty_cells(
    header: tuple[str, ...], lines: list[tuple[int, list[str]]]
) -> tuple[tuple[str, ...], list[tuple[int, list[str]]]]:
    """The table without the empty rows and nameless last columns that a spreadsheet leaves."""
    wide = len(header)
    while wide and not header[wide - 1]:
        wide -= 1
    kept = []
    for number, cells in lines:
        last = max((at for at, cell in enumerate(cells, start=1) if cell.strip()), default=0)
        kept.append((number, cells[: max(wide, last)] if last else []))
    return header[:wide], kept


def _point_decimals(header: tuple[str, ...], lines: list[tuple[int, list[str]]]) -> None:
    """Replace decimal commas by decimal points in columns of numbers, in place."""
    for column in range(len(header)):
        rows = [cells for _, cells in lines if column < len(cells)]
        written = [row[column] for row in rows if row[column].strip().lower() not in _NO_NUMBER]
        if all(map(_NUMBER.fullmatch, written)) and any(
            "," in cell and not _THOUSANDS.fullmatch(cell) for cell in written
        ):
            for row in rows:
                row[column] = row[column].replace(",", ".")


def csv_header(file: Path) -> tuple[str, ...]:
    """The names of a CSV file's columns.

    Raises:
        DataError: As :func:`read_csv`.
    """
    return read_csv(file).header


def require_columns(columns: Iterable[str], header: Sequence[str], file: Path) -> None:
    """Check that a table has columns.

    Raises:
        DataError: One is missing; the hint lists those that are there.
    """
    missing = [name for name in columns if name not in header]
    if missing:
        there = f"columns: {', '.join(header) or 'none'}"
        raise DataError(f"no column {', '.join(missing)}", file=str(file), row=1, hint=there)


def require_unique(header: Sequence[str], file: Path) -> None:
    """Check that no two columns of a table have the same name.

    Raises:
        DataError: Two columns have the same name.
    """
    twice = sorted(_repeated(header))
    if twice:
        raise DataError(f"two columns are called {', '.join(twice)}", file=str(file), row=1)


def _repeated(names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)


def encoding_of(beginning: bytes, file: Path) -> str:
    """The encoding of a CSV file by its first bytes: UTF-8 or UTF-16, with or without a byte order mark.

    Args:
        beginning: Its first bytes, eight or more where it has as many.
        file: The file, for the error.

    Raises:
        DataError: The file is of another kind.
    """
    for first, kind, hint in _OTHER_FILES:
        if beginning.startswith(first):
            raise DataError(f"is {kind}, not CSV", file=str(file), hint=hint)
    return "utf-16" if beginning.startswith(_UTF16) else "utf-8-sig"


def _text(file: Path, *, lenient: bool) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", file=str(file), hint="check the path") from None
    encoding = encoding_of(content, file)
    try:
        return content.decode(encoding, "replace" if lenient else "strict")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError("not UTF-8", file=str(file), row=line, hint="save the file as UTF-8") from None
