"""Reports that people hand on say what they rest on, and refuse what they do not know."""

import json

import pytest
import yaml

import joulery
from joulery.app.runs.recorded import load_run
from joulery.domain.errors import ConfigError, DataError
from joulery.runtime.measuring.terms import SECONDS_PER_YEAR, Terms
from joulery.ui.cli import main
from joulery.ui.reports.disclosure import FunctionalUnit, as_markdown, as_model_card, sci_score
from joulery.ui.reports.table import roll_up

pytestmark = pytest.mark.filterwarnings("ignore::joulery.MeasureWarning")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    common = {"meters": ["fake:50"], "owner": "a|b"}
    with joulery.measure(
        carbon="250 g/kWh", out=folder / "priced", embodied_kg=1500, lifetime_years=5, **common
    ) as measured:
        sum(range(100_000))
    with joulery.measure(out=folder / "unpriced", **common):
        pass
    assert measured.footprint.embodied_g > 0
    return folder


def rollup(runs, *names, by="component"):
    return roll_up([load_run(runs / name) for name in names], by)


def test_embodied_grams_are_the_share_of_the_lifetime_and_no_operational_ones(runs):
    footprint = load_run(runs / "priced").footprint
    assert footprint.embodied_g == pytest.approx(1.5e6 * footprint.duration_s / (5 * SECONDS_PER_YEAR))
    assert footprint.carbon_g == pytest.approx(footprint.energy_j * 250 / 3.6e6)
    assert load_run(runs / "unpriced").footprint.embodied_g == 0.0


@pytest.mark.parametrize("stated", [(5, 0), (0, 5), (-1, 5), (5, float("inf")), (float("nan"), 5)])
def test_embodied_carbon_needs_a_lifetime(stated):
    with pytest.raises(ConfigError, match="embodied"):
        Terms(embodied_kg=stated[0], lifetime_years=stated[1])
    assert Terms.from_dict(Terms(embodied_kg=2, lifetime_years=3).to_dict()).embodied_g(
        SECONDS_PER_YEAR
    ) == pytest.approx(2000 / 3)


def test_the_score_is_operational_and_embodied_grams_per_unit(runs):
    made = rollup(runs, "priced")
    score = sci_score(made, FunctionalUnit.parse("1_000 requests"))
    footprint = made.footprint
    assert score.g_per_unit == pytest.approx((footprint.carbon_g + footprint.embodied_g) / 1000)
    assert str(score).startswith("SCI ") and "none stated" not in str(score)


@pytest.mark.parametrize("text", ["", "requests", "0 requests", "-3 x", "1000", "inf x", "nan x"])
def test_no_functional_unit(text):
    with pytest.raises(ConfigError, match="--per"):
        FunctionalUnit.parse(text)


def test_a_model_card_is_yaml_that_says_what_it_rests_on(runs):
    made = rollup(runs, "priced")
    card = yaml.safe_load(as_model_card(made))["co2_eq_emissions"]
    assert card["emissions"] == pytest.approx(made.footprint.carbon_g, rel=1e-5)
    assert "assumed" in card["source"] and card["hardware_used"] == "cpu:0"


def test_grams_that_are_not_known_are_not_handed_on(runs):
    for names in (("unpriced",), ("priced", "unpriced")):
        with pytest.raises(DataError, match="grams of all the energy"):
            as_model_card(rollup(runs, *names))
        with pytest.raises(DataError, match="grams of all the energy"):
            sci_score(rollup(runs, *names), FunctionalUnit(1, "x"))


def test_markdown_has_a_row_a_group_and_escapes_names(runs):
    text = as_markdown(rollup(runs, "priced", "unpriced", by="owner"))
    assert "a\\|b" in text and "kWh" in text and "Embodied carbon" in text


@pytest.mark.parametrize("by", ["month", "owner-month"])
def test_rows_by_month_add_up(runs, by):
    made = rollup(runs, "priced", "unpriced", by=by)
    assert sum(row.energy_j for row in made.rows) == pytest.approx(made.footprint.energy_j)
    (row,) = made.rows
    assert row.key[:4].isdigit() and row.key.endswith("a|b") is (by == "owner-month")


def test_the_command_prints_each(runs, capsys):
    path = str(runs / "priced")
    assert main(["report", path, "--per", "10 tokens", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sci"]["unit"] == "tokens"
    assert main(["report", path, "--per", "10 tokens"]) == 0
    assert "SCI" in capsys.readouterr().out
    assert main(["report", path, "--per", "10 tokens", "--format", "csv"]) == 2
    assert main(["report", path, "--format", "model-card"]) == 0
    assert capsys.readouterr().out.startswith("co2_eq_emissions:")
