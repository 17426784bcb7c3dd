"""The laws of the measured joule: exact, additive, conserving, scaling; nothing out of missing data."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.charge import IdleRule, ShareRule, split
from joulery.accounting.steps import power_steps
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.energy.footprint import Footprint
from joulery.domain.energy.power import BusyTimes, PowerTrace
from tests.accounting import oracle
from tests.accounting.readings import charge_readings, integrate
from tests.accounting.strategies import WINDOW_S, intensities, traces

TOLERANCE = 1e-9
maybe_carbon = st.one_of(st.none(), intensities())
several = st.lists(traces(), min_size=1, max_size=3)


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-12)


@given(several, WINDOW_S, WINDOW_S, maybe_carbon)
def test_it_agrees_with_rational_arithmetic(
    metered: list[PowerTrace], a_s: float, b_s: float, carbon: CarbonSeries | None
) -> None:
    t0_s, t1_s = sorted((a_s, b_s))
    fp = integrate(metered, t0_s, t1_s, carbon=carbon)
    joules, covered, grams, weighed = oracle.integral(metered, t0_s, t1_s, carbon)
    assert close(fp.energy_j, float(joules))
    assert close(fp.covered_s, float(covered))
    assert close(fp.counted_g, float(grams))
    assert close(fp.carbon_covered_j, float(weighed))


@given(several, st.lists(WINDOW_S, min_size=2, max_size=6), maybe_carbon, st.floats(1.0, 2.0))
def test_it_is_additive_over_any_split_of_the_window(
    metered: list[PowerTrace], cuts: list[float], carbon: CarbonSeries | None, pue: float
) -> None:
    cuts = sorted(cuts)
    whole = integrate(metered, cuts[0], cuts[-1], carbon=carbon, pue=pue)
    pieces = [integrate(metered, a, b, carbon=carbon, pue=pue) for a, b in itertools.pairwise(cuts)]
    total = sum(pieces, Footprint())
    for name in ("energy_j", "counted_g", "carbon_covered_j", "facility_j", "duration_s", "covered_s"):
        assert close(getattr(total, name), getattr(whole, name)), name
    assert [part.key for part in total.parts] == [part.key for part in whole.parts]


@given(traces(), st.floats(0.1, 10.0), WINDOW_S, WINDOW_S, intensities())
def test_it_scales_with_the_power(trace: PowerTrace, k: float, a_s: float, b_s: float, carbon: CarbonSeries) -> None:
    if trace.channel.kind is ReadingKind.COUNTER and trace.channel.wrap_j > 0:
        return
    t0_s, t1_s = sorted((a_s, b_s))
    scaled = PowerTrace(trace.channel, trace.t_ns, trace.values * k, trace.period_s)
    before, after = (integrate([one], t0_s, t1_s, carbon=carbon) for one in (trace, scaled))
    assert close(after.energy_j, k * before.energy_j)
    assert close(after.counted_g, k * before.counted_g)
    assert after.covered_s == before.covered_s


@given(several, st.floats(0.0, 10.0), WINDOW_S, WINDOW_S, intensities())
def test_it_scales_with_the_intensity(
    metered: list[PowerTrace], k: float, a_s: float, b_s: float, carbon: CarbonSeries
) -> None:
    t0_s, t1_s = sorted((a_s, b_s))
    scaled = CarbonSeries("GB", carbon.edges_s, carbon.g_per_kwh * k, source="test")
    before, after = (integrate(metered, t0_s, t1_s, carbon=one) for one in (carbon, scaled))
    assert close(after.counted_g, k * before.counted_g)
    assert after.energy_j == before.energy_j
    assert after.carbon_covered_j == before.carbon_covered_j


@given(traces(), WINDOW_S, WINDOW_S, intensities())
def test_missing_data_makes_neither_joules_nor_grams(
    trace: PowerTrace, a_s: float, b_s: float, carbon: CarbonSeries
) -> None:
    """Where the steps are undefined or the intensity unknown, nothing is counted."""
    t0_s, t1_s = sorted((a_s, b_s))
    blind = PowerTrace(trace.channel, trace.t_ns, np.full(len(trace), math.nan), trace.period_s)
    nothing = integrate([blind], t0_s, t1_s, carbon=carbon)
    assert (nothing.energy_j, nothing.counted_g, nothing.covered_s) == (0.0, 0.0, 0.0)
    dark = CarbonSeries("GB", carbon.edges_s, np.full(len(carbon), math.nan), source="test")
    no_grams = integrate([trace], t0_s, t1_s, carbon=dark)
    assert (no_grams.counted_g, no_grams.carbon_covered_j) == (0.0, 0.0)
    steps = power_steps(trace)
    covered_s = float(np.sum(np.diff(steps.edges_ns)[~np.isnan(steps.watts)])) / 1e9
    fp = integrate([trace], t0_s, t1_s, carbon=carbon)
    assert fp.covered_s <= min(covered_s, fp.duration_s) * (1 + TOLERANCE)
    if fp.covered_s == 0:
        assert fp.energy_j == 0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=20))
def test_a_split_gives_everything_away(rows: list[tuple[float, float, float]]) -> None:
    energy, app, everybody = (np.array(column) for column in zip(*rows, strict=True))
    everybody[::5] = math.nan
    for by in ShareRule:
        shares = split(energy, app, everybody, by=by, capacity_s=75.0)
        assert np.allclose(np.sum(shares, axis=0), energy, rtol=1e-12, atol=1e-300)
        assert all(bool(np.all(share >= -1e-9 * energy)) for share in shares)
        assert shares[3][np.isnan(everybody)].tolist() == energy[np.isnan(everybody)].tolist()


@st.composite
def busy_times(draw: st.DrawFn) -> BusyTimes:
    pairs = draw(st.lists(st.tuples(st.floats(0, 4), st.floats(0, 4)), min_size=1, max_size=8))
    lengths = draw(st.lists(st.integers(1, 8_000_000_000), min_size=len(pairs), max_size=len(pairs)))
    edges = draw(st.integers(-(10**10), 10**10)) + np.cumsum([0, *lengths])
    app, everybody = (np.array(column) for column in zip(*pairs, strict=True))
    unknown = draw(st.integers(0, 10))
    everybody[unknown : unknown + 1] = math.nan
    everybody[everybody < 1] = 0.0
    app[app < 1] = 0.0
    return BusyTimes(edges, app, everybody, cpus=4)


shared = st.tuples(
    traces(device="cpu:0"), traces(device="cpu:1", idle_w=20.0), traces(device="gpu:0", idle_w=60.0), traces("gpu:1")
)


@pytest.mark.slow
@given(
    shared,
    st.tuples(busy_times(), busy_times()),
    st.lists(WINDOW_S, min_size=2, max_size=4),
    maybe_carbon,
    st.sampled_from(list(IdleRule)),
    st.sampled_from(list(ShareRule)),
)
def test_charging_conserves_and_is_additive(
    metered: tuple[PowerTrace, ...],
    times: tuple[BusyTimes, BusyTimes],
    cuts: list[float],
    carbon: CarbonSeries | None,
    idle: IdleRule,
    by: ShareRule,
) -> None:
    cuts = sorted(cuts)
    busy = {"cpu:0": times[0], "cpu:1": times[1]}

    def charged(t0_s: float, t1_s: float) -> tuple[Footprint, Footprint]:
        both = charge_readings(
            metered, busy, t0_s, t1_s, idle=idle, by=by, exclusive={"gpu:0"}, carbon=carbon, pue=1.3, embodied_g=2.0
        )
        return both.run, both.rest

    run, rest = charged(cuts[0], cuts[-1])
    metered_total = integrate(metered, cuts[0], cuts[-1], carbon=carbon, pue=1.3, embodied_g=2.0)
    both = run + rest
    for name in ("energy_j", "counted_g", "carbon_covered_j", "facility_j", "duration_s", "covered_s", "embodied_g"):
        assert close(getattr(both, name), getattr(metered_total, name)), name
    assert close(run.attributed_j + run.idle_j + run.unattributed_j, run.energy_j)
    for side in (run, rest, metered_total):
        assert close(sum(part.carbon_g for part in side.parts) + side.idle_g + side.unattributed_g, side.counted_g)
    assert min(run.idle_j, rest.idle_j, run.unattributed_j) >= -1e-9
    assert all(part.energy_j >= -1e-9 for part in (*run.parts, *rest.parts))
    pieces = [charged(a, b) for a, b in itertools.pairwise(cuts)]
    for side, whole in ((0, run), (1, rest)):
        total = sum((piece[side] for piece in pieces), Footprint())
        for name in ("energy_j", "idle_j", "unattributed_j", "attributed_j", "counted_g", "idle_g", "unattributed_g"):
            assert getattr(total, name) == pytest.approx(getattr(whole, name), rel=TOLERANCE, abs=1e-9), name
