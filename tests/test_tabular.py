import pytest

from joulery.domain.errors import DataError
from joulery.tabular import csv_header, read_csv


@pytest.fixture
def table(tmp_path):
    def write(content, name="t.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_quoted_headers_and_cells_are_read_in_every_encoding(table, encoding):
    path = table('"a, first", "b"\r\n1,"é, ""2"""\r\n\r\n3\r\n'.replace(', "b"', ',"b "').encode(encoding))
    read = read_csv(path)
    assert read.header == ("a, first", "b")
    assert read.lines == [(2, ["1", 'é, "2"']), (3, []), (4, ["3"])]
    assert csv_header(path) == read.header


@pytest.mark.parametrize(("content", "separator"), [("a;b,c;d\n", ";"), ("a\tb\n", "\t"), ("a,b\n", ",")])
def test_the_most_frequent_separator_of_the_header_counts(table, content, separator):
    assert read_csv(table(content), separators=",;\t").header == tuple(content.strip().split(separator))


def test_nothing_is_quoted_between_pipes(table):
    assert read_csv(table('a|b\n"x|1\n'), separators="|,").lines == [(2, ['"x', "1"])]


@pytest.mark.parametrize(
    ("content", "row", "fact"),
    [
        (b"a,b\n1,2\n\xff,3\n", 3, "UTF-8"),
        (b'a,b\n"1,2\n', 2, "CSV"),
        (b"a,b,a\n", 1, "a"),
    ],
)
def test_what_is_wrong_names_file_and_line(table, content, row, fact):
    with pytest.raises(DataError, match=fact) as caught:
        read_csv(table(content))
    assert caught.value.row == row and caught.value.file.endswith("t.csv")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\x03\x04\x14\x00\x06\x00", "is a workbook or an archive, not CSV"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is a workbook, not CSV"),
        (b"\x1f\x8b\x08\x00", "is compressed, not CSV"),
        (b"PAR1\x15\x04", "is Parquet, not CSV"),
    ],
)
def test_a_file_of_another_kind_is_named(table, content, says):
    for lenient in (False, True):
        with pytest.raises(DataError, match=says) as caught:
            read_csv(table(content, "grid.xlsx"), lenient=lenient)
        assert caught.value.hint


def test_a_lenient_reader_takes_what_a_strict_one_refuses(table):
    assert read_csv(table(b'a,b\n\xff,"x"y\n'), lenient=True).lines == [(2, ["\ufffd", "xy"])]


def test_a_missing_file_and_a_missing_column_are_errors(table, tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(DataError, match="no column c, d") as caught:
        read_csv(table("a,b\n")).require(["a", "c", "d"])
    assert "a, b" in caught.value.hint and caught.value.row == 1


def test_an_empty_file_has_no_columns(table):
    assert (read_csv(table("")).header, read_csv(table("")).lines) == ((), [])


def test_what_a_spreadsheet_writes_is_read(table):
    """Decimal commas, a line that names the separator, a column and rows that were left empty."""
    rows = 'sep=;\r\n"t_s";"watt";"who";;\r\n0;83,4;a,b;;\r\n1,5;1.000;"1,2";;\r\n;;;;\r\n'
    read = read_csv(table(rows.encode("utf-8-sig")))
    assert read.header == ("t_s", "watt", "who")
    assert read.lines == [(3, ["0", "83,4", "a,b"]), (4, ["1.5", "1.000", "1,2"]), (5, [])]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["83,4", "", "nan", "90"], ["83.4", "", "nan", "90"]),
        (["0,250", "-1,5e3"], ["0.250", "-1.5e3"]),
        (["1,500", "2,5"], ["1.500", "2.5"]),
        (["1,500", "2,250"], ["1,500", "2,250"]),
        (["1.500,5", "2,5"], ["1.500,5", "2,5"]),
        (["1.5", "2,5"], ["1.5", "2,5"]),
        (["1,2", "gpu"], ["1,2", "gpu"]),
    ],
)
def test_a_comma_is_a_decimal_point_only_where_it_can_be_nothing_else(table, written, read):
    found = read_csv(table("x;y\n" + "".join(f"{cell};1\n" for cell in written)))
    assert [cells[0] for _, cells in found.lines] == read
    assert read_csv(table('x\n"2,5"\n')).lines == [(2, ["2,5"])]
