"""The batch queue's stationary state stays in range, whatever the load."""

import numpy as np
import pytest

from joulery.perf.queues.batch_queue import _counts, _stationary, late_ratio


def chain(batch, mean, scv, states):
    waiting = np.arange(states)
    left = np.maximum(waiting - np.clip(waiting, 1, batch), 0)
    return left, _counts(np.full(states, mean), scv, states)


def transitions(left, counts):
    step = np.zeros((len(left), len(left)))
    for state, rest in enumerate(left):
        for came, chance in enumerate(counts[state]):
            step[state, min(rest + came, len(left) - 1)] += chance
        step[state, -1] += max(0.0, 1 - step[state].sum())
    return step


@pytest.mark.parametrize("mean", [0.5, 2.0, 3.5, 3.99])
@pytest.mark.parametrize("scv", [0.3, 1.0, 4.0])
def test_the_state_is_stationary(mean, scv):
    left, counts = chain(4, mean, scv, 40)
    weight = _stationary(left, counts)
    assert weight.sum() == pytest.approx(1.0)
    assert weight @ transitions(left, counts) == pytest.approx(weight, abs=1e-9)


@pytest.mark.parametrize("mean", [6.0, 20.0, 60.0])
@pytest.mark.parametrize("scv", [0.01, 0.3, 1.0])
def test_an_overloaded_queue_is_always_full_and_nothing_overflows(mean, scv):
    left, counts = chain(4, mean, scv, 60)
    weight = _stationary(left, counts)
    assert np.all(np.isfinite(weight))
    assert weight[-1] > 0.5


@pytest.mark.parametrize("load", [0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("scv", [0.01, 0.25, 1.0, 9.0])
def test_late_ratios_are_ratios_up_to_saturation(load, scv):
    times = [0.002 + 0.001 * size for size in range(1, 33)]
    assert 0.0 <= late_ratio(load * 32 / times[-1], scv, times, 0.05) <= 1.0
