"""``joulery plan --series``."""

import json

from click.testing import CliRunner

from joulery.ui.cli.plan import command

SITE = """
joulery: 1
fleet: {gpus: [{name: V100, price: 3.06 USD/h}]}
plan: {preset: igniter, arrivals: {kind: constant}, duration: 24 h}
services:
  - name: A
    model: alexnet
    slo: {latency: 15 ms, quantile: 99 %}
    rates: [{from: 0 h, rate: 200 /s}, {from: 7 h, rate: 1200 /s}]
  - {name: V, model: vgg19, rate: 150 /s, slo: {latency: 60 ms, quantile: 99 %}}
"""


def test_a_plan_a_period(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text(SITE)
    done = CliRunner().invoke(command, [str(site), "--series", "--json"], catch_exceptions=False)
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and document["schema"] == "joulery.plan-series/1"
    assert [(p["from_s"], p["until_s"]) for p in document["periods"]] == [(0.0, 25200.0), (25200.0, 86400.0)]
    assert document["periods"][0]["difference"] is None and document["periods"][1]["rates_rps"]["A"] == 1200.0
    assert document["cost_usd"] <= document["peak_cost_usd"] and document["migrations"] == document["moves"] == 0
    printed = CliRunner().invoke(command, [str(site), "--series"], catch_exceptions=False).stdout
    assert "07:00" in printed and "over the series" in printed


def test_a_series_needs_rates_that_change(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text(SITE.replace("rates: [{from: 0 h, rate: 200 /s}, {from: 7 h, rate: 1200 /s}]", "rate: 200 /s"))
    done = CliRunner().invoke(command, [str(site), "--series"])
    assert done.exit_code != 0 and "how its rate changes" in str(done.exception)


def test_what_goes_with_one_plan_is_refused_beside_a_series(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text(SITE)
    done = CliRunner().invoke(command, [str(site), "--series", "--triton", str(tmp_path / "t")])
    assert done.exit_code != 0 and "--triton goes with one plan" in str(done.exception)
    assert not (tmp_path / "t").exists()
