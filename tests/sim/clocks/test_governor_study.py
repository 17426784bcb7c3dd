import numpy as np
import pytest

from joulery.domain.errors import ConfigError, DataError
from joulery.perf.catalog.muserve_models import CLOCKS_MHZ, MODELS
from joulery.sim.clocks.governor_study import SCHEMES, ClockCase, plant, run_schemes, workload
from joulery.sim.core.streams import Streams


def test_the_catalog_is_table_1_at_the_highest_clock_and_never_faster_below() -> None:
    by_name = {model.name: model for model in MODELS}
    assert len(by_name) == 15
    assert by_name["GPT2-large"].latency_s[-1] == 0.832
    assert by_name["GPT2-large"].latency_s[CLOCKS_MHZ.index(800)] == pytest.approx(0.949, abs=0.02)
    for model in MODELS:
        assert bool(np.all(np.diff(model.latency_s) < 0)) and 0 < model.sensitivity <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("rate_rps", "slo_scale", "saving"), [(1.0, 5.0, 1.40), (1.5, 10.0, 1.50)])
def test_looking_ahead_saves_most_and_keeps_the_slo_where_reacting_breaks_it(
    rate_rps: float, slo_scale: float, saving: float
) -> None:
    case = ClockCase(rate_rps, slo_scale, duration_s=900.0)
    requests = workload(case, Streams(11))
    found = run_schemes(("fixed", "static-1000", "miad-literal", "predictive"), case, requests)
    fixed, ours, literal = found["fixed"], found["predictive"], found["miad-literal"]
    assert fixed.power_w / ours.power_w >= saving
    assert ours.power_w < 0.95 * found["static-1000"].power_w
    assert ours.attainment_ratio >= fixed.attainment_ratio - 0.003
    assert literal.attainment_ratio < fixed.attainment_ratio - 0.01
    again = run_schemes(("predictive",), case, workload(case, Streams(11)))
    assert again["predictive"] == ours


@pytest.mark.slow
def test_the_best_static_clocks_are_never_worse_than_one_for_all() -> None:
    case = ClockCase(1.5, 10.0, duration_s=300.0, devices=3)
    requests = workload(case, Streams(2))
    found = run_schemes(("fixed", "best-static"), case, requests)
    assert found["best-static"].power_w <= found["fixed"].power_w


def test_every_model_has_one_device_and_every_scheme_is_described() -> None:
    made = plant(ClockCase(1.0, 5.0))
    assert set(made.device_of.tolist()) == set(range(8)) and len(made.device_of) == len(MODELS)
    assert all(SCHEMES.values())


def test_recorded_arrivals_keep_their_pattern_at_the_cases_rate() -> None:
    case = ClockCase(2.0, 5.0, duration_s=100.0)
    log = np.cumsum(np.tile([0.1, 0.1, 10.0], 400))
    requests = workload(case, Streams(0), log)
    assert len(requests.arrival_s) == pytest.approx(200, abs=4)
    gaps = np.diff(requests.arrival_s)
    assert gaps[1] / gaps[0] == pytest.approx(100, rel=0.01)
    for bad in ([1.0], [2.0, 1.0], [1.0, 1.0]):
        with pytest.raises(DataError, match="in order of time"):
            workload(case, Streams(0), np.array(bad))
    with pytest.raises(ConfigError, match="no such clock scheme"):
        run_schemes(("turbo",), case, requests)


def test_a_placement_says_who_shares_a_gpu() -> None:
    hosts = tuple((model.name, index % 3) for index, model in enumerate(MODELS))
    made = plant(ClockCase(1.0, 5.0, devices=4, hosts=hosts))
    assert made.device_of.tolist() == [index % 3 for index in range(15)]
    assert made.devices == 4  # the one that hosts nothing idles
    case = ClockCase(1.0, 5.0, duration_s=30.0, devices=4, hosts=hosts)
    found = run_schemes(("fixed",), case, workload(case, Streams(1)))["fixed"]
    assert found.power_w > 53.0
    for broken in (hosts[:-1], (*hosts[:-1], (MODELS[-1].name, 4))):
        with pytest.raises(DataError, match="expected all 15 on 4"):
            plant(ClockCase(1.0, 5.0, devices=4, hosts=broken))


def bursts(rate_rps: float, duration_s: float, seed: int) -> np.ndarray:
    """Arrivals that come four times as fast in every third minute."""
    random, now_s, arrivals = np.random.default_rng(seed), 0.0, []
    while now_s < duration_s:
        arrivals.append(now_s)
        factor = 2.0 if int(now_s // 60) % 3 == 0 else 0.5
        now_s += random.exponential(1.0 / (factor * rate_rps))
    return np.array(arrivals)


@pytest.mark.slow
@pytest.mark.parametrize(("rate_rps", "slo_scale", "burst"), [(1.0, 5.0, False), (1.5, 10.0, False), (1.5, 10.0, True)])
def test_the_governor_beats_two_clocks_at_their_share_in_time(rate_rps: float, slo_scale: float, burst: bool) -> None:
    case = ClockCase(rate_rps, slo_scale, duration_s=900.0)
    requests = workload(case, Streams(1), bursts(rate_rps, 900.0, 1) if burst else None)
    found = run_schemes(("fixed", "race-to-idle", "power-cap", "busy-idle", "predictive"), case, requests)
    ours, rule = found["predictive"], found["busy-idle"]
    assert ours.power_w < rule.power_w < min(found[name].power_w for name in ("fixed", "race-to-idle", "power-cap"))
    assert ours.attainment_ratio >= min(0.99, rule.attainment_ratio)


def test_with_assumed_curves_it_saves_nearly_as_much_and_misses_no_more() -> None:
    case = ClockCase(1.5, 10.0, duration_s=900.0)
    found = run_schemes(("busy-idle", "predictive-assumed"), case, workload(case, Streams(1)))
    ours, rule = found["predictive-assumed"], found["busy-idle"]
    assert ours.power_w < 1.02 * rule.power_w
    assert ours.attainment_ratio >= rule.attainment_ratio
