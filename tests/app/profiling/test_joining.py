"""A variant that joins a running service: loaded once, timed, and planned by the one next to it."""

import asyncio
import math
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from joulery.app.profiling.joining import JoiningTimes, live_ratio, time_joining, with_joined
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.profile import Timings
from joulery.domain.serving.tensors import TensorSpec
from joulery.perf.blend import rescaled
from joulery.policies.serving.search.layout_space import cpu_slices
from tests.app.serving.test_service import profile

ONE, TWO = cpu_slices((1,))[0], cpu_slices((2,))[0]
SUM = ModelRef(ModelKind.PYTHON, "tests.runtime.toy_models:Sum", '{"busy_s": 0.002}')
SERVICE = SimpleNamespace(name="sums", cores=(), partitions=(cpu_slices((1, 1)), cpu_slices((2,))))


def test_cpu_seconds_say_how_long_a_model_takes_that_computes():
    busy = JoiningTimes(ONE, Timings([0.5], [0.02]))
    made, words = with_joined(profile(), "third", SUM, "large", busy)
    assert "20 ms of CPU time" in words and "times 2.00" in words
    for piece in (ONE, TWO):
        mine, other = made.entry("third", piece), made.entry("large", piece)
        assert mine.loaded.mean_s == pytest.approx(2.0 * other.loaded.mean_s)
        assert mine.energy_j == pytest.approx(2.0 * other.energy_j)


def test_a_busy_machine_hides_no_model_that_computes():
    """Half of the other's requests were preempted for long; so were those of the variant that joins."""
    slow = Timings([0.011, 0.2] * 5, [0.01] * 10)
    entries = [replace(one, alone=slow) if one.variant == "large" else one for one in profile().entries]
    busy = JoiningTimes(ONE, Timings([0.3, 0.02] * 5, [0.02] * 9 + [0.08]))
    made, words = with_joined(replace(profile(), entries=tuple(entries)), "third", SUM, "large", busy)
    assert "CPU time" in words and made.entry("third", ONE).loaded.mean_s == pytest.approx(0.022)


def test_another_server_is_planned_by_its_times_and_its_stated_power():
    remote = ModelRef(ModelKind.REMOTE, "http://host:1/m", '{"power_w": 60.0}')
    made, words = with_joined(profile(), "third", remote, "large", JoiningTimes(ONE, Timings([0.022], [0.001])))
    assert "22 ms of time" in words and made.entry("third", ONE).active_w == 60.0
    assert made.entry("third", ONE).loaded.mean_s == pytest.approx(0.022)


def test_without_times_it_is_planned_as_the_other():
    made, words = with_joined(profile(), "third", SUM, "small", None)
    assert words == "third is planned as if it took the times of small"
    assert made.entry("third", TWO).loaded.mean_s == profile().entry("small", TWO).loaded.mean_s
    again, _ = with_joined(profile(), "third", SUM, "small", JoiningTimes(ONE, Timings([0.1], [0.0])))
    assert again.entry("third", TWO).loaded.mean_s == made.entry("third", TWO).loaded.mean_s, "no CPU seconds were seen"


def test_live_answers_correct_the_times_by_cpu_seconds_however_busy_the_machine_is():
    made, _ = with_joined(profile(), "third", SUM, "large", None)
    slow = Timings([0.2] * 5, [0.02] * 5)
    assert live_ratio(made, "third", {("third", ONE): slow}, {"small", "large"}) == pytest.approx(2.0)
    assert math.isnan(live_ratio(made, "third", {("small", ONE): slow}, {"small", "large"})), "it has not answered"
    assert rescaled(made, "third", 2.0).entry("third", TWO).loaded.mean_s == pytest.approx(2 * 0.0055)
    assert rescaled(made, "third", 2.0).entry("large", TWO) is made.entry("large", TWO)


def test_the_times_of_a_model_that_waits_are_compared_with_those_of_the_others_meanwhile():
    waits = Timings([0.011], [0.0001])
    entries = [replace(one, alone=waits, loaded=waits) for one in profile().entries]
    made, _ = with_joined(replace(profile(), entries=tuple(entries)), "third", SUM, "large", None)
    seen = {("third", ONE): Timings([0.066], [0.0]), ("large", ONE): Timings([0.033], [0.0])}
    assert live_ratio(made, "third", seen, {"small", "large"}) == pytest.approx(2.0), "all take three times as long"
    assert live_ratio(made, "third", {("third", ONE): Timings([0.066], [0.0])}, {"large"}) == pytest.approx(6.0)


def test_a_real_worker_is_loaded_timed_and_ended():
    found = asyncio.run(time_joining(SERVICE, "third", SUM, declared=(TensorSpec("x", "FP32", (-1, 2)),)))
    assert found.piece == ONE and len(found.times) == 10
    assert 0.002 <= found.times.mean_cpu_s <= found.times.mean_s


@pytest.mark.parametrize(
    ("model", "declared", "fault"),
    [
        ("tests.runtime.toy_models:Missing", (), (ConfigError, "no callable 'Missing'")),
        ("tests.runtime.toy_models:Sum", (TensorSpec("z", "FP32", (-1, 2)),), (DataError, "takes other inputs")),
    ],
)
def test_what_cannot_join_is_one_clear_error(model, declared, fault):
    kind, words = fault
    with pytest.raises(kind, match=words):
        asyncio.run(time_joining(SERVICE, "third", ModelRef(ModelKind.PYTHON, model, SUM.options), declared=declared))


def test_a_server_that_does_not_answer_does_not_join():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        absent = ModelRef(ModelKind.REMOTE, f"http://127.0.0.1:{port}/m")
        with pytest.raises(CapabilityError, match="is reached"):
            asyncio.run(time_joining(SERVICE, "third", absent))
