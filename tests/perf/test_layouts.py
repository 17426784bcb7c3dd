import math

import numpy as np
import pytest

from joulery.domain.errors import DataError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.quality import Quality
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.domain.serving.service import Slice, SliceKind
from joulery.perf.layouts import Predictor

ONE, TWO = (Slice(SliceKind.CPU, cores=n) for n in (1, 2))
ACCURACY = {"small": 0.75, "large": 0.78}


def entry(variant: str, piece: Slice, ms: float, cpu_ms: float, loaded: float = 1.0) -> SliceProfile:
    spread = np.linspace(0.9, 1.1, 11)
    alone = Timings(spread * ms / 1e3, spread * cpu_ms / 1e3)
    busy = alone if loaded == 1.0 else Timings(spread * ms * loaded / 1e3, spread * cpu_ms * loaded / 1e3)
    return SliceProfile(variant, piece, alone, busy, 10.0)


PROFILE = Profile(
    {"cores": 2},
    (
        entry("small", ONE, 4, 4, 1.2),
        entry("large", ONE, 9, 9, 1.2),
        entry("small", TWO, 3, 5),
        entry("large", TWO, 6, 11),
    ),
    idle_w=20.0,
    quality=Quality.MODELLED,
    meter="cpu-model",
)
PREDICTOR = Predictor(PROFILE, ACCURACY)


def layout(*pairs: tuple[str, Slice]) -> Layout:
    return Layout(Instance(variant, piece) for variant, piece in pairs)


def test_a_lone_instance_at_light_load_costs_its_profile():
    metrics = PREDICTOR.predict(layout(("large", TWO)), 1.0)
    assert metrics.latency_s == pytest.approx(0.0066, rel=0.02), "the 95th percentile of its own times"
    assert metrics.energy_j == pytest.approx(0.11, rel=0.01)
    assert metrics.accuracy_ratio == 0.78 and metrics.shares == {"large": 1.0}
    assert metrics.utilisation_ratio == pytest.approx(0.006)


def test_a_mixture_weighs_accuracy_and_energy_by_requests():
    metrics = PREDICTOR.predict(layout(("small", ONE), ("large", ONE)), 10.0)
    share = metrics.shares["small"]
    assert sum(metrics.shares.values()) == pytest.approx(1.0) and share == pytest.approx(0.5, abs=0.03)
    assert metrics.accuracy_ratio == pytest.approx(share * 0.75 + (1 - share) * 0.78)
    assert metrics.energy_j == pytest.approx(share * 0.04 + (1 - share) * 0.09, rel=0.04)


def test_energy_between_alone_and_loaded():
    calm = PREDICTOR.predict(layout(("large", ONE), ("large", ONE)), 1.0).energy_j
    rushed = PREDICTOR.predict(layout(("large", ONE), ("large", ONE)), 160.0).energy_j
    assert 0.09 * 0.99 <= calm < rushed < 0.09 * 1.2


def test_latency_grows_with_demand_and_is_infinite_beyond_capacity():
    both = layout(("large", ONE), ("large", ONE))
    latencies = [PREDICTOR.predict(both, rate).latency_s for rate in (10.0, 80.0, 150.0)]
    assert latencies == sorted(latencies) and latencies[0] < latencies[-1]
    beyond = PREDICTOR.predict(both, 200.0)
    assert beyond.latency_s == math.inf and beyond.utilisation_ratio > 1
    assert beyond.as_dict()["latency_s"] is None
    mixed = PREDICTOR.predict(layout(("small", ONE), ("large", ONE)), 1000.0)
    assert mixed.shares["small"] == pytest.approx(9 / 13), "saturated, the fast one answers more"
    assert mixed.energy_j == pytest.approx((9 * 0.048 + 4 * 0.108) / 13)


def test_overhead_is_added_and_quantile_is_the_one_asked_for():
    one = layout(("small", TWO))
    plain = PREDICTOR.predict(one, 50.0)
    slow = Predictor(PROFILE, ACCURACY, overhead_s=0.002).predict(one, 50.0)
    median = Predictor(PROFILE, ACCURACY, quantile=0.5).predict(one, 50.0)
    assert slow.latency_s == pytest.approx(plain.latency_s + 0.002)
    assert median.latency_s < plain.latency_s
    assert slow.energy_j == plain.energy_j


def test_the_same_question_has_the_same_answer():
    both = layout(("small", ONE), ("large", ONE))
    assert PREDICTOR.predict(both, 60.0) == PREDICTOR.predict(both, 60.0)
    assert PREDICTOR.predict(both, 60.0) != Predictor(PROFILE, ACCURACY, seed=1).predict(both, 60.0)


def test_an_unmeasured_pair_says_what_to_run():
    with pytest.raises(DataError, match="large was not measured on cpu:4") as caught:
        PREDICTOR.predict(layout(("large", Slice(SliceKind.CPU, cores=4))), 1.0)
    assert "joulery profile" in caught.value.hint
