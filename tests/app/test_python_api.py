"""The commands as functions of Python."""

from pathlib import Path

import pytest

import joulery
from joulery.domain.errors import ConfigError, DataError

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_plan_a_site_file_and_a_site():
    made = joulery.plan(str(EXAMPLES / "igniter-3.yaml"), preset="igniter")
    again = joulery.plan(joulery.load(EXAMPLES / "igniter-3.yaml"), preset="igniter")
    assert made.document() == again.document() and made.document()["gpus"]


def test_account_recorded_files(tmp_path):
    (tmp_path / "e.csv").write_text("op,start_ns,dur_ns,device\na,0,6000,CPU:0\nb,6000,2000,CPU:0\n")
    (tmp_path / "p.csv").write_text("t_ns,device,power_w\n0,CPU:0,10\n8000,CPU:0,10\n")
    footprint = joulery.account(tmp_path / "e.csv", tmp_path / "p.csv")
    assert sum(footprint.energy_j) == pytest.approx(80e-6)


@pytest.mark.filterwarnings("ignore::joulery.MeasureWarning")
def test_report_runs_together(tmp_path):
    for name in ("a", "b"):
        with joulery.measure(meters=["fake:50"], out=tmp_path / name):
            pass
    both = joulery.report(tmp_path / "a", tmp_path / "b", carbon="250 g/kWh")
    alone = [joulery.report(tmp_path / name) for name in ("a", "b")]
    assert both.energy_j == pytest.approx(sum(each.energy_j for each in alone))
    assert both.carbon_g == pytest.approx(both.energy_j * 250 / 3.6e6) and alone[0].carbon_g is None


def test_what_is_wrong_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no run"):
        joulery.report()
    with pytest.raises((ConfigError, DataError)):
        joulery.report(tmp_path)
    with pytest.raises(ConfigError):
        joulery.simulate(tmp_path / "no.yaml")
    with pytest.raises(ConfigError):
        joulery.plan(tmp_path / "no.yaml")
