"""``joulery compare`` and ``joulery precision`` on small traced runs."""

import json
import re
from pathlib import Path

import pytest

from joulery.ui.cli import main
from tests.ui.reports.anatomy.traced_runs import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("traced")
    return [str(make_run(folder, f"run{seed}", seed=seed, scale=1.0 + 0.5 * (seed == 2))) for seed in range(3)]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == code
        printed = capsys.readouterr()
        return printed.out if code == 0 else printed.err

    return call


def test_matrices_and_changes(said, runs: list[str]) -> None:
    answer = json.loads(said("compare", *runs, "--by", "layer", "--json"))
    assert answer["runs"] == ["run0.run", "run1.run", "run2.run"] and not answer["per_step"]
    pcc, med = answer["energy"]["pcc"], answer["energy"]["med_j"]
    for i in range(3):
        assert pcc[i][i] == pytest.approx(1.0) and med[i][i] == 0
        for j in range(3):
            assert pcc[i][j] == pytest.approx(pcc[j][i]) and med[i][j] == pytest.approx(-med[j][i])
    assert pcc[0][1] > 0.9 and med[2][0] > 0, "the longer run used more"
    rows = {row["name"]: row for row in answer["rows"]}
    assert rows["net/layer_0"]["change_j"][0] == 0
    assert rows["net/layer_0"]["change_j"][2] == pytest.approx(
        rows["net/layer_0"]["energy_j"][2] - rows["net/layer_0"]["energy_j"][0]
    )


def test_text_and_page(said, runs: list[str], tmp_path: Path, browser) -> None:
    text = said("compare", *runs[:2], "--top", "2")
    assert "PCC of STEF" in text and "what changed, by layer" in text and "run1.run" in text
    page = tmp_path / "compare.html"
    said("compare", *runs[:2], "--html", str(page))
    browser.open(page.as_uri())
    browser.wait("document.querySelectorAll('svg.icicle').length == 2")
    assert browser.complaints() == [] and "Side by side" in browser.text("main")
    table = page.read_text().partition("correlation of energy")[2].partition("</table>")[0]
    shades = re.findall(r'class="number heat-(\d)">([^<]*)<', table)
    assert [shade for shade, _ in shades] == ["5", "0", "0", "5"]
    assert [float(value) for _, value in shades][::3] == [1.0, 1.0]


def test_many_runs_keep_their_names_and_those_of_the_layers(said, runs: list[str], tmp_path: Path) -> None:
    more = [str(make_run(tmp_path, f"another{seed}", seed=seed)) for seed in range(5)]
    text = said("compare", *runs, *more, "--top", "3")
    names = [Path(run).name for run in (*runs, *more)]
    assert all(text.count(name) >= 8 for name in names) and "net/layer_0" in text and "…" not in text


def test_models_of_different_depth_are_compared_by_folded_names(said, runs: list[str]) -> None:
    answer = json.loads(said("compare", *runs[:2], "--json"))
    # embed, head and two folded modules with their products, forward and backward, and the optimizer's addition
    assert answer["operations"] == 2 * 2 * 4 + 1


def test_patterns_make_names_of_different_models_alike_in_the_table_too(said, runs: list[str]) -> None:
    answer = json.loads(said("compare", *runs[:2], "--by", "layer", "--pattern", r"layer_\d+|net=", "--json"))
    plain = json.loads(said("compare", *runs[:2], "--by", "module", "--json"))
    rows, before = ({row["name"]: row["energy_j"] for row in one["rows"]} for one in (answer, plain))
    assert set(rows) >= {"attention", "ffn", "head"} and not any("layer" in name for name in rows)
    assert sum(energy[0] for energy in rows.values()) == pytest.approx(sum(energy[0] for energy in before.values()))


def test_one_run_is_no_comparison(said, runs: list[str]) -> None:
    assert "cannot be compared" in said("compare", runs[0], code=2)
    assert "named twice" in said("compare", runs[0], runs[0], code=2)


def test_precision(said, runs: list[str]) -> None:
    answer = json.loads(said("precision", *runs, "--periods", "8,16,36", "--json"))
    assert [entry["period_s"] for entry in answer["asss"]] == [0.008, 0.016, 0.036]
    assert all(0.8 < entry["pcc"] <= 1 for entry in answer["asss"])
    assert [entry["runs"] for entry in answer["assw"]] == [1, 2, 3]
    assert answer["assw"][-1]["pcc"] == pytest.approx(1.0)
    device = answer["devices"]["CPU:0"]
    assert device["resolution_s"] == pytest.approx(0.004) and device["expected_error_ratio"] is None
    assert sum(device["share"].values()) == pytest.approx(1.0)


def test_precision_in_words(said, runs: list[str]) -> None:
    text = said("precision", runs[0])
    assert "sparser sampling (ASSS)" in text and "more repetitions" not in text
    assert "what the sensor resolves" in text and "time-share within windows" in text
    assert "no ASSS" in said("precision", runs[0], "--periods", "1")


@pytest.mark.parametrize("periods", ["x", "0", "-4", "inf", ""])
def test_periods_that_are_none_are_refused(said, runs: list[str], periods: str) -> None:
    assert "--periods" in said("precision", runs[0], "--periods", periods, code=2)
