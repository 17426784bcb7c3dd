"""The batch queue's stationary state stays in range, whatever the load."""

import numpy as np
import pytest

from joulery.perf.queues import batch_queue
from joulery.perf.queues.batch_queue import _counts, _late_ratio, _stationary, late_ratio


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


def utilisation(late, wanted):
    """The highest utilisation at which at most this share of requests is late."""
    low, high = 0.0, 1.0
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (low, middle) if late(middle) > wanted else (middle, high)
    return low


@pytest.mark.parametrize(("batch", "arrivals"), [(1, 90), (4, 90), (8, 90), (16, 140)])
@pytest.mark.parametrize("scv", [0.25, 1.0, 4.0])
def test_the_closed_form_of_long_queues_agrees_with_the_chain(batch, arrivals, scv):
    rate_rps, shape = 100.0, 0.3 + 0.7 * np.arange(1, batch + 1) / batch
    deadline_s = arrivals / rate_rps

    def times(load):
        return load * batch / rate_rps * shape

    chain = utilisation(lambda load: _late_ratio(rate_rps, scv, times(load), deadline_s), 0.01)
    closed = utilisation(lambda load: late_ratio(rate_rps, scv, times(load), deadline_s), 0.01)
    assert closed == pytest.approx(chain, rel=0.015)
    if scv >= 1:
        assert closed <= chain + 1e-3, "an upper bound of the late ratio leaves less utilisation, not more"


@pytest.mark.parametrize("batch", [1, 2, 32, 1024])
@pytest.mark.parametrize("arrivals", [10.0, 79.0, 81.0, 2000.0, 8191.0, 2e4, 1e9])
def test_the_chain_stays_small_for_any_rate_and_deadline(batch, arrivals, monkeypatch):
    states = []

    def spied(left, counts):
        states.append(len(left))
        return _stationary(left, counts)

    monkeypatch.setattr(batch_queue, "_stationary", spied)
    times = 0.9 * batch / 1000.0 * (0.3 + 0.7 * np.arange(1, batch + 1) / batch)
    assert 0 <= late_ratio(1000.0, 1.0, times, arrivals / 1000.0) <= 1
    assert all(count <= 180 for count in states)
