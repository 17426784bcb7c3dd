import numpy as np
import pytest

from joulery.domain.errors import ConfigError
from joulery.perf.power.training_power import RTX3090_CLASSES, JobClass, NodePower, power_table


def test_the_published_node_peaks_near_the_papers() -> None:
    table = power_table(RTX3090_CLASSES, NodePower())
    hottest_w = 32 * 2 * float(table.job_w[:, 1].max())
    assert 25_000 <= hottest_w <= 29_000  # the paper's 32 nodes peak at 28 kW


def test_the_model_by_hand() -> None:
    job = JobClass("job", 290.0, np.array([1.0, 0.5]))
    table = power_table((job,), NodePower(gpus=2, waiting_gpu_w=90.0, cpu_w=60.0, static_w=120.0))
    assert table.gpu_w[0].tolist() == [0.0, 290.0, 190.0]
    assert table.job_w[0].tolist() == [0.0, 410.0, 620.0]
    assert table.speedup[0].tolist() == [0.0, 1.0, 1.0]
    assert table.degradation[0].tolist() == [1.0, 1.0, pytest.approx(410 / 620)]


def test_a_job_that_draws_less_than_a_waiting_process_is_not_heated_by_waiting() -> None:
    table = power_table((JobClass("tiny", 80.0, np.array([1.0, 0.5])),), NodePower())
    assert table.gpu_w[0].tolist() == [0.0, 80.0, 80.0]


def test_bad_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match="start at 1"):
        JobClass("job", 100.0, np.array([0.9]))
    with pytest.raises(ConfigError, match="same numbers"):
        power_table((JobClass("a", 1.0, np.array([1.0])), JobClass("b", 1.0, np.array([1.0, 1.0]))), NodePower())
    with pytest.raises(ConfigError, match="same numbers"):
        power_table((), NodePower())
