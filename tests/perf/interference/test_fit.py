"""The published coefficients from the published profiling runs."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.interference.fit import fit_active, fit_gpu, fit_model
from tests.data_folder import data_folder
from tests.perf.interference.published_runs import published_fit, published_runs

NAMES = {
    "d_load": "load_bytes",
    "d_feedback": "feedback_bytes",
    "n_k": "kernels",
    "t_sch_solo_total": "launch_ms",
    **{k: k for k in ("k1", "k2", "k3", "k4", "k5")},
    "alpha_power": "power_slope",
    "beta_power": "power_offset_w",
    "alpha_cacheutil": "cache_slope",
    "beta_cacheutil": "cache_offset_percent",
    "alpha_cache": "cache_sensitivity",
}


def test_all_published_coefficients():
    document = json.loads((data_folder("igniter") / "coefficients_v100.json").read_text())
    fitted = published_fit()
    hardware = document["hardware"]
    for key, value in (
        ("power_cap_w", hardware["P"]),
        ("clock_max_mhz", hardware["F"]),
        ("idle_w", hardware["p_idle"]),
        ("pcie_bytes_per_ms", hardware["B_pcie"]),
        ("clock_mhz_per_w", hardware["alpha_f"]),
        ("delay_ms_per_neighbour", hardware["alpha_sch"]),
        ("delay_offset_ms", hardware["beta_sch"]),
    ):
        assert getattr(fitted.gpu, key) == pytest.approx(value, rel=1e-4), key
    checked = 0
    for name, published in document["models"].items():
        for theirs, ours in NAMES.items():
            tolerance = {"abs": 1e-3} if (name, theirs) == ("resnet50", "k3") else {"rel": 1e-4}
            assert getattr(fitted[name], ours) == pytest.approx(published[theirs], **tolerance), (name, theirs)
            checked += 1
    assert checked == 4 * 14


def test_the_fit_says_how_good_it_is():
    fitted = published_fit()
    ssd = next(fit for fit in fitted.fits if fit.model == "ssd")
    assert (ssd.data, len(ssd.error_ratio)) == ("solo", 9)
    assert ssd.max_ratio == pytest.approx(0.265, abs=0.001)  # the published residual: up to +27 % at b=1, r=100
    assert ssd.mape_ratio == pytest.approx(0.0619, abs=1e-4)
    assert ssd.bias_ratio == pytest.approx(0.0343, abs=1e-4)
    assert ssd.quantile_ratio(0.95) == pytest.approx(float(np.percentile(np.abs(ssd.error_ratio), 95)))


def test_the_two_other_profiling_runs_disagree_only_where_they_were_measured_apart():
    """The published fit and an independent run share solo points; only the sub-linear fifth launch delay differs."""
    gpu, _ = published_runs()
    again, _ = published_runs()
    assert fit_gpu(dataclasses.replace(again, copies=again.copies[:4])).delay_ms_per_neighbour == pytest.approx(
        fit_gpu(gpu).delay_ms_per_neighbour, rel=0.2
    )


def test_exact_data_gives_back_its_coefficients():
    batch, share = (grid.ravel().astype(float) for grid in np.meshgrid([1, 2, 4, 8, 16], [10, 25, 50, 75, 100]))
    active = (0.02 * batch**2 + 30 * batch + 5) / (share + 0.7) + 1.25
    assert fit_active(batch, share, active) == pytest.approx((0.02, 30, 5, 0.7, 1.25), rel=1e-5)


NINE = [(float(batch), share) for batch in (1, 16, 32) for share in (10.0, 50.0, 100.0)]


@given(st.lists(st.floats(0.05, 500.0), min_size=9, max_size=9), st.sampled_from([1.0, 2.5, 5.0]))
def test_whatever_a_busy_machine_measures_the_coefficients_make_sense(active, unit_percent):
    batch, share = np.array(NINE).T
    k1, k2, k3, k4, k5 = fit_active(batch, share, np.array(active), unit_percent=unit_percent)
    assert k4 > -unit_percent, "a share of one unit takes a finite time"
    assert all(k1 * b * b + k2 * b + k3 > 0 for b in range(1, 33)), "a batch is work"
    assert all(map(math.isfinite, (k1, k2, k3, k4, k5)))


def test_the_bounds_change_no_fit_within_them():
    batch, share = np.array(NINE).T
    active = (0.02 * batch**2 + 30 * batch + 5) / (share + 0.7) + 1.25
    assert fit_active(batch, share, active, unit_percent=2.5) == fit_active(batch, share, active)


def test_a_board_that_never_throttles_has_no_clock_slope():
    gpu, _ = published_runs()
    cool = [copy._replace(clock_mhz=1530.0, power_w=100.0 + 10 * i) for i, copy in enumerate(gpu.copies)]
    assert fit_gpu(dataclasses.replace(gpu, copies=cool)).clock_mhz_per_w == 0.0


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda g: dataclasses.replace(g, copies=g.copies[:2]), "at least 3"),
        (lambda g: dataclasses.replace(g, copies=[c._replace(clock_mhz=1400.0) for c in g.copies]), "full clock"),
    ],
)
def test_too_few_hardware_runs_are_refused(break_it, said):
    gpu, _ = published_runs()
    with pytest.raises(DataError, match=said):
        fit_gpu(break_it(gpu))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda m: dataclasses.replace(m, points=m.points[:4]), "at least 5"),
        (
            lambda m: dataclasses.replace(m, points=[p for p in m.points if p.share_percent == 50] * 2),
            "batches and shares",
        ),
        (lambda m: dataclasses.replace(m, cache=[m.cache[0], m.cache[0]]), "two runs that differ"),
    ],
)
def test_runs_that_determine_nothing_are_refused(break_it, said):
    gpu, models = published_runs()
    with pytest.raises(DataError, match=said):
        fit_model(fit_gpu(gpu), break_it(models["alexnet"]))
