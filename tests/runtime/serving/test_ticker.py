import math
from types import SimpleNamespace

import pytest

from joulery.domain.energy.footprint import Footprint, Part
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare, Outcome, RequestRecord
from joulery.domain.serving.service import Slo
from joulery.domain.serving.timeline import SiteLabel
from joulery.runtime.measuring.live import Window
from joulery.runtime.serving.ticker import TICKS_SHOWN, Ticker


class StillMeters:
    """Two watts of idle and one of work, for ever."""

    def __init__(self, *, counted: bool = True) -> None:
        self.counted = counted

    def update(self):
        return None

    def window(self, start_s, end_s, carbon):
        seconds = end_s - start_s
        run = Footprint(
            parts=(Part("cpu:0", "server", seconds, Quality.MODELLED, "m", 0.5 * seconds),),
            idle_j=2 * seconds,
            duration_s=seconds,
            covered_s=seconds,
            carbon_g=0.1 * seconds if self.counted else 0.0,
            signal="average" if self.counted else None,
            scope="lifecycle" if self.counted else None,
        )
        others = Part("cpu:0", "server", 1.5 * seconds, Quality.MODELLED, "m", 0.25 * seconds)
        return Window(start_s, end_s, run, Footprint(parts=(others,)))

    def meters(self, now_s):
        return ()


class FlatGrid:
    series = source = None

    def at(self, t_s):
        return 360.0

    def grid_s(self, t_s):
        return t_s - 50.0


def ticker(services=("sums",), **options) -> Ticker:
    return Ticker({name: running(name) for name in services}, FlatGrid(), StillMeters(**options), 1.25)


def running(name: str) -> SimpleNamespace:
    setup = SimpleNamespace(owner="me", models={}, slo=Slo(0.1))
    return SimpleNamespace(name=name, setup=setup, base_energy_j=0.5, accuracy_ratio={"small": 0.75, "large": 0.8})


def record(variant="large", latency_s=0.05, outcome=Outcome.OK, service="sums", energy_j=0.2) -> RequestRecord:
    share = EnergyShare(energy_j, energy_j * 1.25 * 360 / 3.6e6, Quality.MODELLED)
    return RequestRecord(service, variant, "r", 10.0, 10.0, 10.0 + latency_s, outcome, 0.01, 0.01, 1, share)


def test_a_tick_sums_up_its_period():
    tick = ticker().tick(10.0, 12.0, [record(), record("small", 0.15), record(outcome=Outcome.FAILED), record()])
    assert (tick.t_s, tick.period_s, tick.power_w, tick.power_band_w) == (12.0, 2.0, 4.5, 0.75)
    assert (tick.g_per_kwh, tick.grid_s, tick.energy_j, tick.carbon_g) == (360.0, -38.0, 6.0, pytest.approx(0.2))
    (service,) = tick.services
    assert (service.requests, service.failed) == (4, 1)
    assert service.mix == (("large", pytest.approx(2 / 3)), ("small", pytest.approx(1 / 3)))
    assert service.accuracy_ratio == pytest.approx((0.8 * 2 + 0.75) / 3)
    assert service.attainment_ratio == pytest.approx(2 / 3) and 0.05 < service.latency_s < 0.15


def test_energy_grams_and_the_baseline_accumulate():
    one = ticker()
    first, second = one.tick(10.0, 11.0, [record()]), one.tick(11.0, 12.0, [record(), record()])
    assert (first.energy_j, second.energy_j) == (3.0, 6.0)
    extra_g = (0.5 - 0.2) * 1.25 * 360 / 3.6e6
    assert first.baseline_g - first.carbon_g == pytest.approx(extra_g)
    assert second.baseline_g - second.carbon_g == pytest.approx(3 * extra_g)


def test_without_a_grid_there_are_no_grams():
    tick = ticker(counted=False).tick(10.0, 11.0, [record()._replace(energy=None)])
    assert math.isnan(tick.carbon_g) and math.isnan(tick.baseline_g) and tick.energy_j == 3.0


def test_a_period_without_requests_and_other_services_requests():
    one = ticker()
    for records in ([], [record(service="other")]):
        (service,) = one.tick(10.0, 11.0, records).services
        assert service.requests == 0 and service.mix == ()
        assert all(map(math.isnan, (service.latency_s, service.attainment_ratio, service.accuracy_ratio)))


def test_the_dashboard_sees_the_latest():
    one = ticker()
    for k in range(TICKS_SHOWN + 10):
        one.tick(float(k), float(k + 1), [])
    seen = one.snapshot(SiteLabel("s", "act"), 0.0, 99.0, [], ["careful"])
    assert len(seen.ticks) == TICKS_SHOWN and seen.ticks[-1].t_s == TICKS_SHOWN + 10
    assert seen.warnings == ("careful",) and (seen.started_s, seen.now_s) == (0.0, 99.0)
    (charge,) = seen.charges
    assert (charge.workload, charge.owner) == ("sums", "me")
    assert charge.footprint.energy_j == pytest.approx(3.0 * (TICKS_SHOWN + 10))


def test_several_services_share_what_a_period_was_charged():
    one = ticker(("sums", "more"))
    tick = one.tick(10.0, 12.0, [record()._replace(cpu_s=0.3), record(service="more")._replace(cpu_s=0.1)])
    assert [(service.service, service.requests) for service in tick.services] == [("sums", 1), ("more", 1)]
    assert one.spent["sums"].energy_j == pytest.approx(4.5) and one.spent["more"].energy_j == pytest.approx(1.5)
    quiet = one.tick(12.0, 14.0, [])
    assert one.spent["more"].energy_j == pytest.approx(4.5), "no request: equal parts"
    assert quiet.energy_j == pytest.approx(sum(spent.energy_j for spent in one.spent.values()))
    charges = one.snapshot(SiteLabel("s", "act"), 0.0, 99.0, [], []).charges
    assert [charge.workload for charge in charges] == ["sums", "more"]


def test_requests_of_other_services_change_no_baseline():
    one = ticker()
    tick = one.tick(10.0, 11.0, [record(service="other")])
    assert tick.baseline_g == pytest.approx(tick.carbon_g)
