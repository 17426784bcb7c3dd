"""Profile folders: what is read, and what is refused with file and row."""

import json

import pytest

from joulery.domain.errors import DataError
from joulery.store.variant_tables import model_number, read_tables
from tests.data_folder import data_folder

HEADER = "mean_interarrival_s,partition_code,models,accuracy_pct,p95_ms,energy_j_per_request\n"
MODEL = {"per_service": {"cats": {"base_acc": 80.0, "base_p95_ms_sla": 100.0, "base_energy_j": 50.0}}}


def folder(tmp_path, rows="1,1,ab,75.5,90,40\n0.2,0,b,80,120,12.5\n", model=MODEL, header=HEADER):
    (tmp_path / "model.json").write_text(model if isinstance(model, str) else json.dumps(model))
    (tmp_path / "exhaustive_cats.csv").write_text(header + rows)
    return tmp_path


def test_a_small_folder_becomes_a_table_in_si_units(tmp_path):
    table = read_tables(folder(tmp_path))["cats"]
    assert (table.base_accuracy_ratio, table.base_latency_s, table.base_energy_j) == (0.8, 0.1, 50.0)
    assert table.loads_s == (1.0, 0.2)
    first, second = table.entries
    assert first.instances == (("a", "3g.20gb"), ("b", "4g.20gb"))
    assert (first.accuracy_ratio, first.latency_s, first.energy_j) == (0.755, 0.09, 40.0)
    assert second.instances == (("b", "7g.40gb"),)


def test_the_published_form_is_read_whole():
    tables = read_tables(data_folder("clover") / "synth_v1")
    assert {name: len(table.entries) for name, table in tables.items()} == {
        "efficientnet": 3 * 1282,
        "yolo": 3 * 208,
        "albert": 3 * 1282,
    }
    assert tables["albert"].base_latency_s == pytest.approx(0.160334)


@pytest.mark.parametrize(
    ("rows", "row", "text"),
    [
        ("1,19,a,75,90,40\n", 2, "partition '19'"),
        ("1,0,a,75,90,40\n1,x,a,75,90,40\n", 3, "partition 'x'"),
        ("1,1,a,75,90,40\n", 2, "2 slices but models 'a'"),
        ("1,0,a,75,nan,40\n", 2, "p95_ms is 'nan'"),
        ("1,0,a,75,90,-3\n", 2, "energy_j_per_request is '-3'"),
        ("1,0,a,,90,3\n", 2, "accuracy_pct is ''"),
        ("0,0,a,75,90,3\n", 2, "mean_interarrival_s is '0'"),
        ("1,0,a,75\n", 2, "p95_ms is ''"),
        ("", None, "no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, row, text):
    with pytest.raises(DataError, match=text) as caught:
        read_tables(folder(tmp_path, rows))
    assert caught.value.row == row


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("{", "not JSON"),
        ("[]", "no services"),
        ({"per_service": {}}, "no services"),
        ({"per_service": {"cats": 3}}, "'cats' is not an object"),
        ({"per_service": {"cats": {"base_acc": 80.0}}}, "base_p95_ms_sla is None"),
        ({"per_service": {"dogs": MODEL["per_service"]["cats"]}}, "cannot be read"),
    ],
)
def test_bad_models_are_named(tmp_path, model, text):
    with pytest.raises(DataError, match=text):
        read_tables(folder(tmp_path, model=model))


def test_missing_columns_and_folders_are_named(tmp_path):
    with pytest.raises(DataError, match="no column p95_ms"):
        read_tables(folder(tmp_path, header=HEADER.replace("p95_ms", "p99_ms")))
    with pytest.raises(DataError, match="cannot be read"):
        read_tables(tmp_path / "nowhere")


def test_a_number_of_a_model_may_be_nought_unless_it_has_to_be_positive(tmp_path):
    file = tmp_path / "model.json"
    assert model_number({"cv": 0}, "cv", file) == 0.0
    assert model_number({"cv": 0.25}, "cv", file, positive=True) == 0.25
    with pytest.raises(DataError, match="cv is 0, expected a positive"):
        model_number({"cv": 0}, "cv", file, positive=True)
    for wrong in ({"cv": -0.1}, {"cv": float("inf")}, {"cv": float("nan")}, {"cv": "much"}, {}):
        with pytest.raises(DataError, match="a number of 0 or more") as caught:
            model_number(wrong, "cv", file)
        assert caught.value.file == str(file)
