import numpy as np
import pytest

from joulery.perf.power.training_power import POWER_LIMITS, RTX3090_CLASSES, NodePower, limited, power_table
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.plant import Jobs
from joulery.sim.training.study import Setting, jobs_from_trace, run_scheme, synthetic_trace
from reproduce.green.bound import least_grams

NODE = NodePower()


def one_job(kind: int = 5) -> Jobs:
    return Jobs(np.array([0.0]), np.array([3600.0]), np.array([kind]), np.array([1]), np.array([8]))


def test_time_without_price_takes_the_least_energy_and_time_above_all_takes_the_fastest() -> None:
    flat = Intensity(np.array([360.0]))
    cheap, fast = least_grams(one_job(), RTX3090_CLASSES, (1, NODE), flat, (0.0, 1e6))
    energies, times = [], []
    for ratio in (1.0, *POWER_LIMITS):
        table = power_table(limited(RTX3090_CLASSES, ratio), NODE)
        for n in range(1, 9):
            times.append(3600.0 / table.speedup[5, n])
            energies.append((table.job_w[5, n] - n * NODE.asleep_w / 2) * times[-1])
    assert cheap.cluster_kg == pytest.approx(min(energies) * 360.0 / 3.6e6 / 1e3)
    assert fast.mean_jct_s == pytest.approx(min(times))
    assert fast.cluster_kg >= cheap.cluster_kg and fast.mean_jct_s <= cheap.mean_jct_s


def test_a_clean_hour_within_reach_is_waited_for_and_one_beyond_is_not() -> None:
    clean_late = Intensity(np.where(np.arange(48) == 5, 1.0, 500.0))
    (waits,) = least_grams(one_job(4), RTX3090_CLASSES, (1, NODE), clean_late, (0.0,), wait_h=12)
    (hasty,) = least_grams(one_job(4), RTX3090_CLASSES, (1, NODE), clean_late, (0.0,), wait_h=4)
    assert waits.mean_jct_s > 5 * 3600.0 > hasty.mean_jct_s
    assert waits.cluster_kg < 0.1 * hasty.cluster_kg


@pytest.mark.parametrize("name", ["green-lean", "green-swift", "tiresias", "zeus", "pollux:sleep=1"])
def test_no_scheme_beats_it(name: str) -> None:
    jobs = jobs_from_trace(*synthetic_trace(2, 80, "year", Streams(2)), Streams(2))
    carbon = Intensity(np.tile([300.0, 100.0, 50.0, 200.0], 12))
    prices = (0.0, 0.005, 0.02, 0.1, 1.0)
    curve = least_grams(jobs, RTX3090_CLASSES, (16, NODE), carbon, prices)
    run = run_scheme(name, Setting(nodes=16), jobs, carbon)
    for price, point in zip(prices, curve, strict=True):
        paid = run.cluster_kg + price * float(run.jct_s.sum()) / 3600.0
        assert paid >= point.cluster_kg + price * point.mean_jct_s * len(jobs) / 3600.0
