"""Rows and columns of CSV files: read, or refused by row."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from joulery.domain.errors import DataError
from joulery.store.columns import float_column, read_column, read_parquet, read_parquet_columns, read_rows


def written(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "grid.csv"
    path.write_bytes(text.encode(encoding))
    return path


def test_the_numbers_of_a_column_in_order(tmp_path):
    path = written(tmp_path, "hour,ci\n0,250\n1, 3.5e1\n2,0\n")
    column = read_column(path, "ci")
    assert column.tolist() == [250.0, 35.0, 0.0]
    assert not column.flags.writeable


def test_a_byte_order_mark_and_quotes_are_no_fault(tmp_path):
    assert read_column(written(tmp_path, '\ufeffci,"a, b"\n1,"x\ny"\n2,z\n'), "ci").tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "row", "message"),
    [
        ("ci\n1\nnan\n", 3, "'nan'"),
        ("ci\n1\n\n", None, None),
        ("ci\n1\n\n2\n", 3, "ci is missing: the line is empty"),
        ("ci,x\n1,2\n,2\n", 3, "''"),
        ("x,ci\n1,2\n1\n", 3, "''"),
        ("ci\n-1\n", 2, "'-1'"),
        ("ci\ninf\n", 2, "'inf'"),
        ("ci\nlots\n", 2, "'lots'"),
        ("x\n1\n", 1, "no column ci"),
        ("", 1, "no column ci"),
        ("ci\n", None, "no rows"),
    ],
)
def test_bad_files_are_named_by_row(tmp_path, text, row, message):
    path = written(tmp_path, text)
    if message is None:
        assert read_column(path, "ci").tolist() == [1.0], "an empty line at the end is no row"
        return
    with pytest.raises(DataError, match=message) as caught:
        read_column(path, "ci")
    assert caught.value.row == row
    assert caught.value.file == str(path)


def test_a_least_value_can_be_asked_for(tmp_path):
    path = written(tmp_path, "t\n-5\n")
    assert read_column(path, "t", least=-10.0).tolist() == [-5.0]


def test_unreadable_files_say_why(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_column(tmp_path / "nowhere.csv", "ci")
    with pytest.raises(DataError, match="not UTF-8"):
        read_column(written(tmp_path, "ci,ä\n1,2\n", "latin-1"), "ci")


def test_rows_hold_the_columns_asked_for_and_know_where_they_stand(tmp_path):
    rows = read_rows(written(tmp_path, 'name,n,x\n"a\nb",2,z\nc,4,z\n'), ("name", "n"))
    assert [dict(row.cells) for row in rows] == [{"name": "a\nb", "n": "2"}, {"name": "c", "n": "4"}]
    assert [row.number for row in rows] == [3, 4], "the first row takes two lines"
    assert [row.whole("n") for row in rows] == [2, 4]
    assert rows[0].positive("n") == 2.0


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "", "many"])
def test_what_is_no_number_above_nought_is_refused_by_row(tmp_path, text):
    row = read_rows(written(tmp_path, f"n,x\n{text},z\n"), ("n",))[0]
    for read in (row.positive, row.whole):
        with pytest.raises(DataError, match=f"n is '{text}', .*above 0") as caught:
            read("n")
        assert (caught.value.row, caught.value.file) == (2, str(tmp_path / "grid.csv"))


def test_a_fraction_is_no_whole_number(tmp_path):
    row = read_rows(written(tmp_path, "n\n2.5\n"), ("n",))[0]
    assert row.positive("n") == 2.5
    with pytest.raises(DataError, match=r"n is '2\.5', .*whole number"):
        row.whole("n")


def test_missing_columns_are_named_with_those_there_are(tmp_path):
    with pytest.raises(DataError, match="no column b, c") as caught:
        read_rows(written(tmp_path, "a,d\n1,2\n"), ("a", "b", "c"))
    assert caught.value.hint == "columns: a, d"


def test_columns_of_a_parquet_file_that_may_be_missing(tmp_path):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"a": [1, 2], "b": [0.5, 1.5], "c": ["x", "y"]}), path)
    found = read_parquet_columns(path, ["a"], optional=["b", "d"])
    assert {name: values.tolist() for name, values in found.items()} == {"a": [1.0, 2.0], "b": [0.5, 1.5]}
    assert list(read_parquet_columns(path, ["a"])) == ["a"]
    with pytest.raises(DataError, match="no column d"):
        read_parquet_columns(path, ["a", "d"], optional=["b"])
    with pytest.raises(DataError, match="c holds no numbers"):
        read_parquet_columns(path, ["a"], optional=["c"])


def test_missing_numbers_of_an_optional_column_are_refused_too(tmp_path):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"a": [1, 2], "b": [0.5, None]}), path)
    with pytest.raises(DataError, match="b is nan, expected a number") as caught:
        read_parquet_columns(path, ["a"], optional=["b"])
    assert caught.value.row == 2


def test_columns_of_a_parquet_file_as_they_are(tmp_path):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"a": [1, None], "b": ["x", "y"], "c": [1, 2]}), path)
    found = read_parquet(path, ["b"], optional=["a", "d"])
    assert list(found) == ["b", "a"]
    assert found["b"].tolist() == ["x", "y"]
    assert np.isnan(float_column(found["a"], "a", path)).tolist() == [False, True]
    with pytest.raises(DataError, match="b holds no numbers"):
        float_column(found["b"], "b", path)
    with pytest.raises(DataError, match="no column d") as caught:
        read_parquet(path, ["d"])
    assert caught.value.hint == "columns: a, b, c"
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path)
    with pytest.raises(DataError, match="no rows"):
        read_parquet(path, ["a"])
