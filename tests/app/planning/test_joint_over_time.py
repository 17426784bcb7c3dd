"""``joulery plan`` of joint plans over time: from the plan that runs, and over a file of loads."""

import json

import pytest
from click.testing import CliRunner

from joulery.app.planning.load_series import read_loads
from joulery.domain.errors import DataError
from joulery.ui.cli import plan as plan_command

SITE = """
joulery: 1
name: joint
fleet:
  gpus: [{name: V100, profile: v100-calibrated, price: 3.06 USD/h, clocks: 2}]
plan: {preset: joint, margin: 5 %, replicas: 2, max_batch: 8, judge: falsePLAN}
services:
  - {name: photos, model: resnet50, rate: PHOTOS /s, slo: {latency: 30 ms, quantile: 99 %}}
  - {name: video, model: ssd, rate: 100 /s, slo: {latency: 45 ms, quantile: 99 %}}
"""


def site_file(folder, photos=500, plan="", name="site.yaml"):
    (folder / name).write_text(SITE.replace("PLAN", plan).replace("PHOTOS", str(photos)))
    return folder / name


def run(*arguments):
    return CliRunner().invoke(plan_command.command, [str(each) for each in arguments])


@pytest.fixture
def running(tmp_path):
    plan = tmp_path / "plan.json"
    assert run(site_file(tmp_path), "--out", plan).exit_code == 0
    return plan


def test_the_next_plan_says_its_moves(tmp_path, running):
    changed = site_file(tmp_path, 600, name="changed.yaml")
    free = run(changed, "--running", running, "--json")
    assert free.exit_code == 0, free.output
    moves = json.loads(free.output)["moves"]
    assert moves["moves"] == moves["started"] + moves["stopped"] + moves["changed"]
    again = run(site_file(tmp_path, 500, name="same.yaml"), "--running", running, "--json")
    assert json.loads(again.output)["moves"]["moves"] == 0
    shown = run(changed, "--running", running)
    assert "moves from the running plan" in shown.output
    assert "no bound" in shown.output


def test_moves_are_limited_by_the_site_or_the_flag(tmp_path, running):
    changed = site_file(tmp_path, 5000, ", moves: 1", "changed.yaml")
    found = run(changed, "--running", running)
    assert getattr(found.exception, "exit_code", None) == 3
    assert found.exception.binding == "moves"
    assert run(changed, "--running", running, "--max-moves", 100).exit_code == 0


def test_a_joint_plan_follows_a_joint_plan(tmp_path):
    other = tmp_path / "best.json"
    assert run(site_file(tmp_path), "--preset", "best", "--out", other).exit_code == 0
    found = run(site_file(tmp_path), "--running", other)
    assert "a joint plan follows a joint plan, this is one of best" in str(found.exception)


def test_a_series_of_loads(tmp_path):
    loads = tmp_path / "loads.csv"
    loads.write_text("hour,load\n0,0.4\n8,1.0\n20,0.5\n")
    found = run(site_file(tmp_path), "--series", loads, "--json")
    assert found.exit_code == 0, found.output
    day = json.loads(found.output)
    assert (day["schema"], day["kind"]) == ("joulery.plan-series/1", "joint")
    assert [each["from_s"] for each in day["periods"]] == [0, 8 * 3600, 20 * 3600]
    assert day["periods"][0]["rates_rps"] == {"photos": 200.0, "video": 40.0}
    assert day["total"] <= min(day["peak_total"], day["hourly_total"]) * (1 + 1e-9)
    shown = run(site_file(tmp_path), "--series", loads).output
    assert "kWh over the series" in shown and "20:00" in shown


def test_a_series_of_loads_for_plans_of_shares(tmp_path):
    loads = tmp_path / "loads.csv"
    loads.write_text("from_s,photos,video\n0,100,50\n3600,500,100\n")
    found = run(site_file(tmp_path), "--preset", "best", "--series", loads, "--json")
    assert found.exit_code == 0, found.output
    assert [each["rates_rps"]["photos"] for each in json.loads(found.output)["periods"]] == [100.0, 500.0]


def test_a_service_without_load_is_not_planned_for(tmp_path):
    loads = tmp_path / "loads.csv"
    loads.write_text("hour,photos,video\n0,500,0\n1,500,100\n")
    day = json.loads(run(site_file(tmp_path), "--series", loads, "--json").output)
    assert day["periods"][0]["rates_rps"] == {"photos": 500.0}
    loads.write_text("hour,photos,video\n0,0,0\n1,500,100\n")
    assert "needs some load in every period" in str(run(site_file(tmp_path), "--series", loads).exception)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column from_s or hour"),
        ("hour\n", "no column load, and none for service photos"),
        ("hour,load\n", "no row below the header"),
        ("hour,load\n0,x\n", "load is not a number from 0: x"),
        ("hour,load\n0,nan\n", "load is not a number from 0: nan"),
        ("hour,load\n0,-1\n", "load is not a number from 0: -1"),
        ("hour,load\n0\n", "load is not a number from 0: empty"),
        ("hour,load\n1,1\n", "hour ascends from 0, not 1"),
        ("hour,load\n0,1\n0,1\n", "hour ascends from 0, not 0"),
        ("hour,load,colour\n0,1,1\n", "column colour is neither a service nor known"),
        ("hour,photos\n0,1\n", "none for service video"),
    ],
)
def test_what_is_no_series_of_loads(tmp_path, text, said):
    file = tmp_path / "loads.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=said):
        read_loads(file, {"photos": 500.0, "video": 100.0})
