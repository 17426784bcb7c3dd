"""Prices from the user's file: on demand, spot for services that allow it, and what is wrong with a file."""

import pytest

from joulery.app.planning.plans import PlanOptions, plan_site
from joulery.app.planning.shares import share_request
from joulery.config import load
from joulery.domain.errors import ConfigError, DataError, InfeasibleError

SITE = """
joulery: 1
fleet:
  prices: prices.csv
  gpus: [{{name: V100{gpu}}}]
plan: {{arrivals: {{kind: constant}}}}
services:
  - {{name: A, model: alexnet, rate: 400 /s, slo: {{latency: 15 ms}}}}
  - {{name: B, model: vgg19, rate: 300 /s, slo: {{latency: 20 ms}}{spot}}}
"""
PRICES = "gpu,market,usd_per_hour\nV100,on-demand,3.06\nV100,spot,0.92\nH100,spot,2.10\n"


def site(tmp_path, prices=PRICES, spot="", gpu=""):
    (tmp_path / "prices.csv").write_text(prices)
    (tmp_path / "site.yaml").write_text(SITE.format(spot=spot, gpu=gpu))
    return load(tmp_path / "site.yaml")


def test_services_are_on_demand_unless_they_say_spot(tmp_path):
    plan = plan_site(site(tmp_path)).plan
    assert {gpu.type for gpu in plan.gpus} == {"V100"}
    assert plan.usd_per_hour == 3.06 * len(plan.gpus)


def test_a_service_that_may_be_on_spot_takes_it_where_that_is_cheaper(tmp_path):
    """4000 /s of A take on-demand GPUs of their own; B joins none of them."""
    text = SITE.format(spot=", spot: true", gpu="").replace("400 /s", "4000 /s")
    (tmp_path / "prices.csv").write_text(PRICES)
    (tmp_path / "site.yaml").write_text(text)
    plan = plan_site(load(tmp_path / "site.yaml")).plan
    of_b = {gpu.type for gpu in plan.gpus for each in gpu.instances if each.workload == "B"}
    assert of_b == {"V100-spot"}
    assert all(gpu.usd_per_hour == {"V100": 3.06, "V100-spot": 0.92}[gpu.type] for gpu in plan.gpus)


def test_a_joint_plan_takes_spot_gpus_for_the_services_that_may_be_on_them(tmp_path):
    text = SITE.format(spot=", spot: true", gpu="").replace("400 /s", "4000 /s").replace("300 /s", "900 /s")
    text = text.replace("plan: {", "plan: {objective: weights, weights: {cost: 1, energy: 0.1}, judge: false, ")
    (tmp_path / "prices.csv").write_text(PRICES)
    (tmp_path / "site.yaml").write_text(text)
    made = plan_site(load(tmp_path / "site.yaml"))
    assert made.plan.policy == "joint", "the objective asks for it"
    where = {name: {g.type for g in made.plan.gpus for e in g.instances if e.workload == name} for name in "AB"}
    assert where["A"] == {"V100"} and "V100-spot" in where["B"]
    assert made.plan.certificate.bound <= made.plan.certificate.value


@pytest.mark.parametrize("preset", ["best", "igniter", "ffd", "joint"])
def test_without_an_on_demand_price_a_service_that_may_not_be_on_spot_is_infeasible(tmp_path, preset):
    with pytest.raises(InfeasibleError) as caught:
        plan_site(site(tmp_path, "gpu,market,usd_per_hour\nV100,spot,0.92\n"), PlanOptions(preset))
    assert caught.value.binding == "market of A"


def test_the_price_of_the_site_is_kept_where_the_file_has_none(tmp_path):
    made = site(tmp_path, "gpu,market,usd_per_hour\nV100,spot,0.92\n", gpu=", price: 2 USD/h")
    assert {kind.name: (kind.usd_per_hour, kind.spot) for kind in share_request(made).types} == {
        "V100": (2.0, False),
        "V100-spot": (0.92, True),
    }


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ("gpu,market,usd_per_hour\nV100,monthly,3\n", "monthly"),
        ("gpu,market,usd_per_hour\nV100,spot,3\nV100,spot,4\n", "second price"),
        ("gpu,market,usd_per_hour\nV100,spot,-3\n", "usd_per_hour"),
        ("gpu,market,usd_per_hour\nV100,spot,nan\n", "usd_per_hour"),
        ("gpu,market,usd_per_hour\nH100,spot,3\n", "no price of any GPU type"),
        ("gpu,usd_per_hour\nV100,3\n", "market"),
        ("", "prices.csv"),
    ],
)
def test_a_faulty_file_is_one_clear_error(tmp_path, prices, said):
    with pytest.raises(DataError) as caught:
        plan_site(site(tmp_path, prices))
    assert said in str(caught.value)


def test_a_gpu_without_any_price_is_pointed_at(tmp_path):
    (tmp_path / "site.yaml").write_text(SITE.format(spot="", gpu="").replace("  prices: prices.csv\n", ""))
    with pytest.raises(ConfigError, match="price") as caught:
        load(tmp_path / "site.yaml")
    assert caught.value.pointer == "fleet.gpus.0"
    made = site(tmp_path, "gpu,market,usd_per_hour\nV100,spot,1\n")
    with pytest.raises(ConfigError, match="no price of V100"):
        plan_site(made, PlanOptions("columns"))
