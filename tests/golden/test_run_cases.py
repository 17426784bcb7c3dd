"""The runner of golden case files: what it counts, and how it ends."""

import json

import pytest

from tests.data_folder import data_folder
from tests.golden.run_cases import main

A_PLAN = {
    "workloads": [
        {"id": "A", "model": "alexnet", "slo_ms": 15, "rate_rps": 500},
        {"id": "R", "model": "resnet50", "slo_ms": 40, "rate_rps": 400},
        {"id": "V", "model": "vgg19", "slo_ms": 60, "rate_rps": 200},
    ],
    "plan": [[["V", 37.5, 6], ["R", 30, 8], ["A", 10, 4]]],
}


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def written(folder, document):
    file = folder / "cases.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(file)


def test_the_published_twelve_workloads(capsys):
    assert main([str(data_folder("igniter") / "plan_cases_example.json")]) == 0
    assert last_line(capsys) == "1 passed, 0 failed"


def test_the_three_of_the_motivation_example(tmp_path, capsys):
    assert main([written(tmp_path, {"sets": [A_PLAN, A_PLAN]})]) == 0
    assert last_line(capsys) == "2 passed, 0 failed"


@pytest.mark.parametrize(
    "plan",
    [
        [[["V", 37.5, 6], ["A", 10, 4], ["R", 30, 8]]],
        [[["V", 37.5, 6], ["R", 30, 8]], [["A", 10, 4]]],
        [[["V", 37.5, 6], ["R", 30, 8], ["A", 12.5, 4]]],
        [[["V", 37.5, 6], ["R", 30, 8], ["A", 10, 4]], [["V", 37.5, 6]]],
    ],
    ids=["order", "another GPU", "share", "one GPU more"],
)
def test_a_plan_that_differs_fails(tmp_path, capsys, plan):
    assert main([written(tmp_path, {"sets": [A_PLAN, {**A_PLAN, "plan": plan}]})]) == 1
    assert last_line(capsys) == "1 passed, 1 failed"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{", "not a JSON file"),
        ({"stars": 3}, "no kind of case file has these keys: stars"),
        ([1, 2], "no kind of case file"),
        ({"sets": []}, "without a single case"),
    ],
)
def test_a_file_that_cannot_run_counts_as_failed(tmp_path, capsys, document, said):
    good = tmp_path / "good.json"
    good.write_text(json.dumps({"sets": [A_PLAN]}))
    assert main([written(tmp_path, document), str(good)]) == 1
    out = capsys.readouterr().out
    assert said in out
    assert out.endswith("1 passed, 1 failed\n")


def test_a_missing_file_counts_as_failed(tmp_path, capsys):
    assert main([str(tmp_path / "none.json")]) == 1
    assert last_line(capsys) == "0 passed, 1 failed"


def test_no_file_at_all_fails(capsys):
    assert main([]) == 1
    assert last_line(capsys) == "0 passed, 1 failed"


def test_a_case_with_an_unknown_model_is_one_clear_line(tmp_path, capsys):
    broken = {**A_PLAN, "workloads": [{"id": "A", "model": "yolo", "slo_ms": 15, "rate_rps": 500}]}
    assert main([written(tmp_path, {"sets": [broken]})]) == 1
    assert "no coefficients for model 'yolo'" in capsys.readouterr().out
