"""The one reader of CSV files: quoted headers, encodings, and one wording of errors.

Every layer may import it, except the pure ones (``domain``, ``perf``, ``accounting``, ``policies``).
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from joulery.domain.errors import DataError

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV file in memory.

    Attributes:
        file: The file.
        header: Names of its columns, stripped.
        lines: Line number (1-based, the last one of a cell with line breaks) and cells of each row; an empty line has
            no cells, a row may be shorter or longer than the header.
    """

    file: Path
    header: tuple[str, ...]
    lines: Sequence[tuple[int, list[str]]]

    def require(self, columns: Iterable[str]) -> None:
        """Check that columns are there.

        Raises:
            DataError: One is missing.
        """
        require_columns(columns, self.header, self.file)


def read_csv(file: Path, *, separators: str = ",", lenient: bool = False) -> CsvTable:
    """Read a CSV file: UTF-8 or UTF-16, with or without a byte order mark, its first row the names of the columns.

    Args:
        file: The file.
        separators: Separators to choose from; the most frequent one of the header counts. With ``|`` nothing is quoted.
        lenient: Read undecodable bytes and unbalanced quotes as they are instead of refusing them.

    Raises:
        DataError: The file cannot be read, is not text or not CSV, or two columns have the same name.
    """
    text = _text(file, lenient=lenient)
    first = text.partition("\n")[0]
    separator = max(separators, key=first.count)
    quoting: Literal[0, 3] = csv.QUOTE_NONE if separator == "|" else csv.QUOTE_MINIMAL
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, quoting=quoting, strict=not lenient)
    try:
        header = tuple(name.strip() for name in next(reader, []))
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", file=str(file), row=reader.line_num) from None
    require_unique(header, file)
    return CsvTable(file, header, lines)


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
        DataError: Two have.
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


def _text(file: Path, *, lenient: bool) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", file=str(file), hint="check the path") from None
    encoding = "utf-16" if content.startswith(_UTF16) else "utf-8-sig"
    try:
        return content.decode(encoding, "replace" if lenient else "strict")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError("not UTF-8", file=str(file), row=line, hint="save the file as UTF-8") from None
