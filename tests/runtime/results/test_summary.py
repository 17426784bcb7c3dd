import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.charge import Charged, cpu_shares, divide
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.footprint import Footprint, Part
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.json_numbers import known_numbers
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare, Outcome, RequestRecord
from joulery.domain.serving.service import ModelFamily, ModelVariant, Slice, SliceKind, Slo
from joulery.domain.serving.timeline import Tick
from joulery.perf.layouts import Predictor
from joulery.runtime.results.summary import (
    RunCost,
    ServedService,
    compared,
    summarise_run,
    with_baseline,
)
from joulery.runtime.session.requests import RequestColumns
from tests.app.serving.test_service import profile

ONE = Slice(SliceKind.CPU, cores=1)
SMALL, LARGE = (Layout([Instance(name, ONE)] * 2) for name in ("small", "large"))
FAMILY = ModelFamily(
    "sums",
    "sums",
    "share of right sums",
    (ModelVariant("small", 0.75, "published"), ModelVariant("large", 0.8, "published")),
)
PREDICTOR = Predictor(profile(), {"small": 0.75, "large": 0.8})


def record(k: int, variant: str, outcome: Outcome = Outcome.OK) -> RequestRecord:
    cpu_s = {"small": 0.004, "large": 0.01}[variant] * (1 + 0.1 * (k % 3 - 1))
    arrival_s = 100.0 + 0.1 * k
    return RequestRecord(
        "sums", variant, "r0", arrival_s, arrival_s, arrival_s + 1.1 * cpu_s, outcome, cpu_s, cpu_s, 1, None
    )


HALF = [record(k, "large" if k < 50 else "small") for k in range(100)]


def served(records=HALF, **changes) -> ServedService:
    name = changes.setdefault("name", "sums")
    blank = ServedService(
        requests=RequestColumns.of(one._replace(service=name) for one in records),
        layouts=[(99.0, LARGE), (104.95, SMALL)],
        family=FAMILY,
        slo=Slo(0.0105),
        predictor=PREDICTOR,
        base=LARGE,
        carbon=CarbonSeries("X", [0.0, 105.0, 1000.0], [100.0, 300.0], source="test"),
    )
    return replace(blank, **changes)


def cost(attributed_j: float = 10.0, idle_j: float = 40.0) -> RunCost:
    return RunCost(charged(attributed_j, idle_j), cpu_s=1.0, load_cpu_s=0.1)


def charged(attributed_j: float = 10.0, idle_j: float = 40.0) -> Charged:
    run = Footprint(
        parts=(Part("cpu:0", "server", attributed_j, Quality.MODELLED, "cpu-model", 3.0),),
        idle_j=idle_j,
        carbon_g=0.004,
        duration_s=10.0,
        covered_s=10.0,
    )
    return Charged(run, Footprint(parts=(Part("cpu:0", "server", 7.0, Quality.MODELLED, "cpu-model"),)))


@given(st.floats(0, 1e6), st.floats(0, 1e4), st.one_of(st.floats(0, 1e4), st.just(math.nan)), st.floats(0, 1e4))
def test_shares_add_up_to_what_was_charged(attributed_j, requests_s, load_s, cpu_s):
    shares = divide(attributed_j, requests_s, load_s, cpu_s)
    total = shares.requests_j + shares.load_j + shares.serving_j
    assert total == pytest.approx(attributed_j, rel=1e-9, abs=1e-9)
    assert shares.requests_j >= 0 and shares.load_j >= 0 and shares.serving_j >= -1e-9 * max(1.0, attributed_j)


def test_shares_follow_cpu_time():
    shares = divide(10.0, 0.7, 0.1, 1.0)
    assert (shares.requests_j, shares.load_j, shares.serving_j) == pytest.approx((7.0, 1.0, 2.0))
    assert shares.joules_per_cpu_s == 10.0
    rounded_down = divide(10.0, 0.9, 0.3, 1.0)
    assert rounded_down.serving_j == pytest.approx(0.0) and rounded_down.joules_per_cpu_s == pytest.approx(10 / 1.2)


def test_joules_of_boards_are_the_requests_that_ran_there():
    gpu = Part("gpu:0", "board", 90.0, Quality.MEASURED, "nvml")
    run = replace(charged().run, parts=(*charged().run.parts, gpu))
    on_gpu = RunCost(Charged(run, Footprint()), cpu_s=1.0, load_cpu_s=0.1, boards=frozenset({"gpu:0"}))
    shares = on_gpu.shares([served()])
    assert (shares.requests_j, shares.load_j, shares.serving_j) == pytest.approx((90.0, 1.0, 9.0))
    assert shares.joules_per_cpu_s == pytest.approx(90.0 / served().requests_cpu_s)
    figures = summarise_run(pair(), on_gpu, [None, None])
    assert sum(one["requests_j"] for one in figures["services"]) == pytest.approx(90.0)
    assert figures["requests_j"] + figures["load_generator_j"] + figures["serving_j"] == pytest.approx(100.0)


def test_boards_on_which_no_request_ran_served_no_request():
    run = replace(charged().run, parts=(Part("gpu:0", "board", 90.0, Quality.MEASURED, "nvml"),))
    cost = RunCost(Charged(run, Footprint()), cpu_s=1.0, load_cpu_s=0.1, boards=frozenset({"gpu:0"}))
    shares = cost.shares([served(records=[])])
    assert (shares.requests_j, shares.load_j, shares.serving_j, shares.joules_per_cpu_s) == (0.0, 0.0, 90.0, 0.0)


def test_the_figures_of_a_run():
    run = served()
    figures = summarise_run([run], cost(), [compared(run)])
    assert (figures["requests"], figures["failed"], figures["variants"]) == (100, 0, {"small": 0.5, "large": 0.5})
    assert figures["accuracy_ratio"] == pytest.approx(0.775)
    assert figures["accuracy_source"] == "share of right sums, published, weighted by requests"
    latency = [record.latency_s for record in HALF]
    assert figures["p95_s"] == pytest.approx(np.quantile(latency, 0.95)) and not figures["slo_met"]
    assert figures["attainment_ratio"] == pytest.approx(np.mean(np.array(latency) <= 0.0105))
    assert figures["layout_changes"] == 1 and figures["other_j"] == 7.0
    total = figures["requests_j"] + figures["serving_j"] + figures["load_generator_j"] + 40.0
    assert total == pytest.approx(charged().run.energy_j)
    assert json.dumps(known_numbers(figures))


def test_savings_count_grams_where_the_grid_is_known():
    """Large while the grid is at 100, small while it is at 300: three quarters of the baseline's grams are in the
    second half, of which the small one saves 60 %."""
    run = served()
    figures = summarise_run([run], cost(), [compared(run)])
    assert figures["saving_of"] == "grams" and figures["baseline_seen_live"]
    assert figures["saving_ratio"] == pytest.approx(0.75 * 0.6, abs=0.01)
    assert figures["saving_energy_ratio"] == pytest.approx(0.5 * 0.6, abs=0.01)
    assert figures["baseline"] == "the same requests on large+large"
    assert 1 - figures["requests_g"] / figures["baseline_requests_g"] == pytest.approx(figures["saving_ratio"])
    saved_g = figures["baseline_requests_g"] - figures["requests_g"]
    assert figures["saving_with_idle_ratio"] == pytest.approx(saved_g / (0.004 + saved_g))
    assert figures["saving_with_idle_ratio"] < figures["saving_ratio"], "idle power dilutes every saving"
    assert figures["calibration"]["cpu_error_ratio"] == pytest.approx(0.0, abs=0.01)


def test_without_a_grid_joules_are_compared_and_no_gram_is_made_up():
    run = served(carbon=None)
    figures = known_numbers(summarise_run([run], cost(), [compared(run)]))
    assert figures["saving_of"] == "joules"
    assert figures["saving_ratio"] == pytest.approx(figures["saving_energy_ratio"])
    assert figures["requests_g"] is None and figures["baseline_requests_g"] is None
    saved_j = figures["baseline_requests_j"] - figures["requests_j"]
    assert figures["saving_machine_ratio"] == pytest.approx(saved_j / (50.0 + saved_j)), "of 50 J in all"


def figures_of(*services):
    return summarise_run(services, cost(), [compared(one) for one in services])


def test_on_a_grid_of_zeros_joules_are_compared():
    """No gram is emitted, and no share of none is saved; what several services save is of those that emitted some."""
    none = CarbonSeries("X", [0.0, 1000.0], [0.0], source="test")
    figures, known = figures_of(served(carbon=none)), figures_of(served())
    assert figures["saving_of"] == "joules" and known["saving_of"] == "grams"
    assert figures["requests_g"] == figures["baseline_requests_g"] == 0.0
    assert figures["saving_ratio"] == pytest.approx(known["saving_energy_ratio"])
    assert 0 < figures["saving_machine_ratio"] < figures["saving_ratio"]
    both = figures_of(served(carbon=none), served(carbon=none, name="b"))
    assert both["saving_of"] == "joules" and both["saving_ratio"] == pytest.approx(figures["saving_ratio"])


def test_what_failed_is_counted_and_charged_but_not_compared():
    bad = [record(k, "small", Outcome.FAILED) for k in range(100, 110)]
    run = served(records=[*HALF, *bad])
    figures = summarise_run([run], cost(), [compared(run)])
    assert (figures["requests"], figures["failed"]) == (110, 10)
    assert figures["requests_cpu_s"] == pytest.approx(sum(record.cpu_s for record in [*HALF, *bad]))
    assert compared(run).requests == 100


def test_nothing_answered_gives_no_figure_that_needs_an_answer():
    run = served(records=[record(0, "small", Outcome.OVERLOADED)])
    assert compared(run) is None
    figures = known_numbers(summarise_run([run], cost(), [None]))
    assert (figures["requests"], figures["failed"]) == (1, 1)
    assert figures["p95_s"] is None and figures["accuracy_ratio"] is None and figures["slo_met"] is False
    assert "saving_ratio" not in figures and figures["variants"] == {}
    assert known_numbers(summarise_run([served(records=[])], cost(), [None]))["requests_j"] == 0


def test_ticks_get_the_baselines_grams_with_their_interval():
    run, account = served(), cost()
    found = compared(run)
    figures = summarise_run([run], account, [found])
    ticks = [Tick(100.0 + k, 1.0, carbon_g=0.0004 * k) for k in range(1, 11)]
    done = with_baseline(ticks, [run], [found], account)
    extra = [tick.baseline_g - tick.carbon_g for tick in done]
    assert extra[3] == pytest.approx(0.0, abs=1e-6), "while the baseline itself ran it saves nothing"
    assert extra[-1] == pytest.approx(figures["baseline_requests_g"] - figures["requests_g"], rel=1e-6)
    assert all(a <= b + 1e-7 for a, b in itertools.pairwise(extra[4:]))
    assert all(t.baseline_low_g <= t.baseline_g <= t.baseline_high_g for t in done)
    assert with_baseline(ticks, [served(carbon=None)], [found], account) == tuple(ticks)


def test_known_numbers_goes_all_the_way_down():
    assert known_numbers({"a": math.nan, "b": [math.inf, 1.0, ("x", {"c": -math.inf})], "d": 3}) == {
        "a": None,
        "b": [None, 1.0, ["x", {"c": None}]],
        "d": 3,
    }


def test_a_share_of_energy_is_not_needed_for_the_account():
    priced = [r._replace(energy=EnergyShare(1.0, 1.0, Quality.MODELLED)) for r in HALF]
    run, same = served(records=priced), served()
    assert summarise_run([run], cost(), [compared(run)]) == summarise_run([same], cost(), [compared(same)])


def pair() -> list[ServedService]:
    """The run of the other tests, and a service that never saves anything."""
    steady = [record(k, "large") for k in range(40)]
    return [served(name="sums"), served(name="more", owner="others", records=steady, layouts=[(99.0, LARGE)])]


def test_the_total_of_several_services_is_their_sum():
    both = pair()
    figures = summarise_run(both, cost(), [compared(one) for one in both])
    sums, more = figures["services"]
    assert (sums["service"], more["service"], more["owner"]) == ("sums", "more", "others")
    for name in ("requests", "failed", "requests_j", "requests_cpu_s", "requests_g", "baseline_requests_g"):
        assert figures[name] == pytest.approx(sums[name] + more[name]), name
    assert figures["layout_changes"] == 1 and figures["slo_met"] is (sums["slo_met"] and more["slo_met"])
    kept = sums["attainment_ratio"] * 100 + more["attainment_ratio"] * 40
    assert figures["attainment_ratio"] == pytest.approx(kept / 140)
    assert sums["charged_j"] + more["charged_j"] == pytest.approx(50.0)
    total = figures["requests_j"] + figures["serving_j"] + figures["load_generator_j"] + 40.0
    assert total == pytest.approx(50.0)
    known = known_numbers(figures)
    assert known["p95_s"] is None and known["accuracy_ratio"] is None, "there is no p95 of unlike services"
    assert json.dumps(known)


def test_savings_of_several_services_weigh_by_what_they_would_have_cost():
    both = pair()
    figures = summarise_run(both, cost(), [compared(one) for one in both])
    sums, more = figures["services"]
    weight = sums["baseline_requests_g"] / figures["baseline_requests_g"]
    expected = weight * sums["saving_ratio"] + (1 - weight) * more["saving_ratio"]
    assert figures["saving_ratio"] == pytest.approx(expected)
    assert abs(more["saving_ratio"]) < 0.02 < figures["saving_ratio"] < sums["saving_ratio"]
    assert figures["saving_low_ratio"] <= figures["saving_ratio"] <= figures["saving_high_ratio"]
    alone = summarise_run(both[:1], cost(), [compared(both[0])])
    assert {"p95_s", "saving_with_idle_ratio", "calibration"} <= set(alone), "one service keeps its own figures"


def test_a_service_that_answered_nothing_leaves_the_others_figures_alone():
    both = [served(name="sums"), served(name="more", records=[], layouts=[(99.0, LARGE)])]
    found = [compared(one) for one in both]
    figures = known_numbers(summarise_run(both, cost(), found))
    assert figures["saving_ratio"] == pytest.approx(figures["services"][0]["saving_ratio"])
    assert figures["services"][1]["p95_s"] is None and figures["services"][1]["charged_j"] == 0
    assert not figures["slo_met"]


def test_the_baseline_of_several_services_adds_up():
    both = pair()
    found = [compared(one) for one in both]
    figures = summarise_run(both, cost(), found)
    (last,) = with_baseline([Tick(120.0, 1.0, carbon_g=0.004)], both, found, cost())
    saved_g = figures["baseline_requests_g"] - figures["requests_g"]
    assert last.baseline_g - last.carbon_g == pytest.approx(saved_g, rel=1e-6)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_shares_of_cpu_time_add_up_to_one(cpu_s):
    shares = cpu_shares(cpu_s)
    assert math.fsum(shares) == pytest.approx(1.0) and all(share >= 0 for share in shares)
    if sum(cpu_s) == 0:
        assert len(set(shares)) == 1


_ENDS = st.lists(st.tuples(st.sampled_from(list(Outcome)), st.floats(0.001, 0.1)), max_size=40)


@given(_ENDS, _ENDS)
def test_no_request_is_lost_from_sight(first, second):
    def ended(rows):
        blank = record(0, "small")
        return [blank._replace(outcome=end, end_s=blank.arrival_s + took_s) for end, took_s in rows]

    both = [served(ended(rows), name=name) for name, rows in (("a", first), ("b", second))]
    figures = summarise_run(both, cost(), [None, None])
    for entry, rows in zip([figures, *figures["services"]], [[*first, *second], first, second], strict=True):
        assert entry["requests"] == len(rows) == entry["answered"] + entry["failed"] + entry["abandoned"]
        assert 0 <= entry["refused"] <= entry["failed"] and 0 <= entry["late"] <= entry["answered"]
        assert entry["abandoned"] == sum(end is Outcome.CANCELLED for end, _ in rows)
        assert entry["refused"] == sum(end is Outcome.OVERLOADED for end, _ in rows)


def test_accuracy_is_declared_until_every_variant_that_answered_has_labels():
    declared = summarise_run([served()], cost(), [None])
    assert (declared["accuracy_basis"], declared["accuracy_labels"]) == ("declared", 0)
    assert "accuracy_low_ratio" not in declared
    part = summarise_run([served(labels={"small": (3, 4)})], cost(), [None])
    assert (part["accuracy_basis"], part["accuracy_labels"], part["accuracy_ratio"]) == ("declared", 4, 0.775)
    found = summarise_run([served(labels={"small": (60, 100), "large": (180, 200)})], cost(), [None])
    assert (found["accuracy_basis"], found["accuracy_labels"]) == ("observed", 300)
    assert found["accuracy_ratio"] == pytest.approx(0.5 * 0.6 + 0.5 * 0.9), "by the shares of the answers"
    assert found["accuracy_low_ratio"] < 0.75 < found["accuracy_high_ratio"] < 0.82
    assert found["accuracy_declared_ratio"] == pytest.approx(0.775)
