"""Calibration: the measured points come back, from the catalog and from a rough first guess."""

from dataclasses import replace

import numpy as np
import pytest

from joulery.domain.errors import ConfigError
from joulery.perf.catalog.clover_services import CLOVER_POINTS, CLOVER_SERVICES
from joulery.perf.queues.pull_costs import PullPoint
from joulery.sim.core.streams import Streams
from joulery.sim.queues.pull_fit import errors, fit, instances_of, scaled, simulate
from tests.data_folder import data_folder
from tests.sim.serving.clover_profile import rows

GAPS = np.random.RandomState(1).exponential(1.0, 2000)
"""The arrivals of the published runs: numpy's old generator, seed 1."""
ROUND_S = {"yolo": (0.25, 0.03, 0.06), "efficientnet": (0.25, 0.02, 0.1), "albert": (0.04, 0.02, 0.06)}
"""Host time, and device times of the smallest and the largest variant."""


def rough(name):
    """Round numbers that anyone would write down: everything alike, a device time for each class of size."""
    service = CLOVER_SERVICES[name]
    host_s, least_s, most_s = {
        "yolo": (0.25, 0.03, 0.06),
        "efficientnet": (0.25, 0.02, 0.1),
        "albert": (0.04, 0.02, 0.06),
    }[name]
    steps = np.linspace(least_s, most_s, len(service.variants))
    joules = np.geomspace(1.0, 30.0, len(service.variants))
    variants = [
        replace(variant, host_s=host_s, gpu_s=float(gpu_s), dynamic_j=float(joule))
        for variant, gpu_s, joule in zip(service.variants, steps, joules, strict=True)
    ]
    return replace(
        service, variants=tuple(variants), contention=0.1, size_cv=0.2, jitter_s=0.01, idle_w=50.0, source="guess"
    )


def judged(service, points):
    found = errors(service, points, GAPS)
    assert max(abs(error.accuracy_points) for error in found) <= 0.05
    assert max(abs(error.energy_ratio) for error in found) <= 0.10
    return [error.p95_ratio for error in found]


def test_points_are_the_published_ones():
    published = rows(data_folder("clover") / "measured_arrival_sweep.csv")
    ours = [point for service in ("yolo", "efficientnet", "albert") for point in CLOVER_POINTS[service]]
    assert len(ours) == len(published) == 18
    for point, row in zip(ours, published, strict=True):
        assert point.requests == int(row["n_requests"])
        assert point.interarrival_s == float(row["mean_interarrival_s"])
        assert point.accuracy_ratio == pytest.approx(float(row["accuracy_pct"]) / 100)
        assert point.p95_s == pytest.approx(float(row["p95_latency_ms"]) / 1000)
        assert point.energy_j == pytest.approx(float(row["energy_j_per_request"]), abs=5e-4)
        assert len(point.instances) == len(row["models"])


def test_the_catalog_reproduces_the_eighteen_points():
    p95 = [error for name, service in CLOVER_SERVICES.items() for error in judged(service, CLOVER_POINTS[name])]
    assert sum(abs(error) <= 0.10 for error in p95) >= 16
    assert max(map(abs, p95)) <= 0.35
    for service in CLOVER_SERVICES.values():
        assert 70 <= service.gpus * service.idle_w <= 80, "two idle A100s draw 75 W"


@pytest.mark.slow
def test_a_fit_from_round_numbers_reproduces_them_too():
    """Two services; ``joulery profile --fit`` is tested with all three."""
    p95 = []
    for name in ("yolo", "albert"):
        fitted = fit(rough(name), CLOVER_POINTS[name], GAPS)
        p95 += judged(fitted, CLOVER_POINTS[name])
        assert 70 <= fitted.gpus * fitted.idle_w <= 80
        assert "calibrated on 6 measured points" in fitted.source
    assert sum(abs(error) <= 0.10 for error in p95) >= 10
    assert max(map(abs, p95)) <= 0.35


def test_accuracies_are_the_published_ones():
    published = {(row["service"], row["variant"]): row for row in rows(data_folder("clover") / "variants.csv")}
    for name, service in CLOVER_SERVICES.items():
        for variant in service.variants:
            row = published[name, variant.name]
            assert 100 * variant.accuracy_ratio == pytest.approx(float(row["accuracy_pct"]))
            assert row["in_search_space"] == "1"


def test_factors_move_the_seen_variants_each_and_the_others_together():
    service = CLOVER_SERVICES["efficientnet"]
    x = np.log(np.array([2.0, 3.0, 5.0, 8.0, 27.0, 45.0, 1.1, 1.2, 1.3, 1.4]))
    moved = scaled(service, ["efficientnet-b3", "efficientnet-b7"], x)
    ratio = {
        new.name: (new.host_s / old.host_s, new.gpu_s / old.gpu_s, new.dynamic_j / old.dynamic_j)
        for new, old in zip(moved.variants, service.variants, strict=True)
    }
    assert ratio["efficientnet-b3"] == pytest.approx((2.0, 3.0, 5.0))
    assert ratio["efficientnet-b7"] == pytest.approx((8.0, 27.0, 45.0))
    assert ratio["efficientnet-b1"] == ratio["efficientnet-b5"] == pytest.approx((4.0, 9.0, 15.0))
    assert moved.contention == pytest.approx(1.1 * service.contention)
    assert moved.jitter_s == pytest.approx(1.2 * service.jitter_s)
    assert moved.size_cv == pytest.approx(1.3 * service.size_cv)
    assert moved.idle_w == pytest.approx(1.4 * service.idle_w)


def test_instances_are_those_of_every_gpu_with_their_slice():
    service = CLOVER_SERVICES["yolo"]
    pool = instances_of(service, [("yolov5l", "3g.20gb"), ("yolov5x6", "4g.20gb")])
    assert [each.name for each in pool] == ["yolov5l on 3g.20gb", "yolov5x6 on 4g.20gb"] * 2
    assert pool[1].gpu_s == pytest.approx(1.65 * 0.07109)
    assert pool[1].floor_s == pytest.approx(0.5 * (0.2969 + 0.07109))
    with pytest.raises(ConfigError, match="no variant 'l'"):
        instances_of(service, [("l", "3g.20gb")])


def test_one_window_is_measured_as_published():
    service = CLOVER_SERVICES["yolo"]
    found = simulate(service, [("yolov5x6", "7g.40gb")], GAPS[:100], 1.0, Streams(0))
    assert found.requests == 100
    assert found.served == (50, 50)
    assert found.idle_j == pytest.approx(2 * service.idle_w * found.window_s)
    errors_ = errors(
        service, [PullPoint(1.0, 100, (("yolov5x6", "7g.40gb"),), 0.55, found.p95_s, 100.0)], GAPS, seeds=1
    )
    assert errors_[0].p95_ratio == pytest.approx(0.0)
    assert errors_[0].accuracy_points == pytest.approx(0.0)
    assert errors_[0].energy_ratio == pytest.approx(found.energy_j_per_request / 100 - 1)
