"""``joulery measure --trace jax`` and ``--trace tensorflow``: unchanged programs down to their operations."""

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from joulery.store.run.directory import Run, open_run
from joulery.store.run.tensors import kept_events, kept_footprint

pytestmark = pytest.mark.e2e

# Never imported here: both start threads that a later fork of this process would stumble over.
with_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed: pip install 'joulery[jax]'"
)
with_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'joulery[tensorflow]'",
)

JAX = """
import functools, sys, jax, jax.numpy as jnp

@functools.partial(jax.jit, donate_argnums=0)
def step(weights, x):
    def loss(weights):
        with jax.named_scope("net/layer_0"):
            hidden = jnp.tanh(x @ weights[0])
        with jax.named_scope("net/layer_1"):
            return ((hidden @ weights[1]) ** 2).mean()
    slopes = jax.grad(loss)(weights)
    with jax.named_scope("sgd"):
        return [weight - 0.1 * slope for weight, slope in zip(weights, slopes)]

weights = jax.jit(lambda key: [jax.random.normal(k, (64, 64)) for k in jax.random.split(key)])(jax.random.key(0))
assert isinstance(step, jax.stages.Wrapped) and step.__name__ == "step" and step.lower(weights, jnp.ones((8, 64)))
if "own" in sys.argv:
    jax.profiler.start_trace("own")
for number in range(8):
    weights = step(weights, jnp.ones((8, 64)))
    if "own" in sys.argv and number == 1:
        jax.profiler.stop_trace()
    if "late" in sys.argv and number == 3:
        with jax.profiler.trace("own"):
            step([weight + 0 for weight in weights], jnp.ones((8, 64)))
print("trained")
sys.exit(7)
"""

TENSORFLOW = """
import sys, tensorflow as tf

class Net(tf.Module):
    def __init__(self):
        self.first, self.second = (tf.Variable(tf.random.normal((64, 64))) for _ in range(2))

    def __call__(self, x):
        with tf.name_scope("net/layer_0"):
            hidden = tf.tanh(x @ self.first)
        with tf.name_scope("net/layer_1"):
            return tf.reduce_mean((hidden @ self.second) ** 2)

net = Net()

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = net(x)
    for weight, slope in zip((net.first, net.second), tape.gradient(loss, (net.first, net.second))):
        weight.assign_sub(0.1 * slope)

for _ in range(8):
    step(tf.ones((8, 64)))
print("trained")
sys.exit(7)
"""

KERAS = """
import numpy as np, tensorflow as tf

model = tf.keras.Sequential([tf.keras.layers.Dense(64, activation="relu", name="up"), tf.keras.layers.Dense(4, name="down")])
model.compile(optimizer="adam", loss="mse")
model.fit(np.ones((64, 32), "f"), np.ones((64, 4), "f"), batch_size=8, verbose=0)
print("trained")
"""  # noqa: E501


def measured(folder: Path, framework: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    measure = [sys.executable, "-m", "joulery", "measure", "--meter", "fake:50", "--trace", framework, "--out", "run"]
    return subprocess.run(
        [*measure, "--steps", "skip=1,warmup=1,active=2,repeat=1", "--", sys.executable, "train.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def counts(run: Run) -> Counter[tuple[str, str]]:
    footprint = kept_footprint(run)
    (device,) = footprint.devices
    assert device.attributed_j + device.unattributed_j == pytest.approx(device.total_j, rel=1e-9)
    rows = zip(footprint.op, footprint.phase, footprint.count.tolist(), strict=True)
    return Counter({(op, phase): count for op, phase, count in rows})


@with_jax
def test_an_unchanged_jax_program_by_scope_and_phase(tmp_path: Path) -> None:
    done = measured(tmp_path, "jax", JAX)
    assert done.returncode == 7 and done.stdout == "trained\n", done.stderr
    run = open_run(tmp_path / "run")
    found = counts(run)
    assert found["net/layer_0/dot_general", "forward"] >= 2 and found["net/layer_1/dot_general", "forward"] >= 2
    assert any(op.startswith("net/layer_1/") and phase == "backward" for op, phase in found)
    assert any(op.startswith("sgd/") for op, _ in found)
    (session,) = run.manifest["tracing"]["sessions"]
    assert session["steps"] == 2 and abs(session["clock_offset_ns"]) < 10_000_000
    events = kept_events(run)
    assert session["start_s"] * 1e9 - 1e6 < events.start_ns.min() and events.end_ns.max() < session["end_s"] * 1e9 + 1e6
    assert list((tmp_path / "run" / "trace").iterdir()) == []


@with_jax
@pytest.mark.parametrize("when", ["own", "late"])
def test_the_jax_programs_own_profiler_goes_first(tmp_path: Path, when: str) -> None:
    done = measured(tmp_path, "jax", JAX, when)
    assert done.returncode == 7 and done.stdout == "trained\n", done.stderr
    assert list((tmp_path / "own").rglob("*.xplane.pb"))
    assert counts(open_run(tmp_path / "run"))["net/layer_0/dot_general", "forward"] >= 1


@with_jax
def test_a_jax_program_that_compiles_nothing_is_warned(tmp_path: Path) -> None:
    done = measured(tmp_path, "jax", "import jax\nprint('plain')\n")
    assert done.returncode == 0 and done.stdout == "plain\n"
    assert "called no function of jax.jit" in done.stderr


@with_tensorflow
def test_an_unchanged_tensorflow_program_by_scope_and_phase(tmp_path: Path) -> None:
    done = measured(tmp_path, "tensorflow", TENSORFLOW)
    assert done.returncode == 7 and done.stdout == "trained\n", done.stderr
    run = open_run(tmp_path / "run")
    found = counts(run)
    assert found["net/layer_0/matmul", "forward"] == found["net/layer_1/matmul/MatMul_1", "backward"] == 2
    (session,) = run.manifest["tracing"]["sessions"]
    assert session["steps"] == 2 and abs(session["clock_offset_ns"]) < 10_000_000


@with_tensorflow
def test_an_unchanged_keras_program_by_layer_and_phase(tmp_path: Path) -> None:
    done = measured(tmp_path, "tensorflow", KERAS)
    assert done.returncode == 0 and done.stdout == "trained\n", done.stderr
    found = counts(open_run(tmp_path / "run"))
    phases = {phase: {op for op, at in found if at == phase} for phase in ("forward", "backward", "optimizer")}
    assert any("/up" in op for op in phases["forward"]) and any("/down" in op for op in phases["backward"])
    assert phases["optimizer"] and all(op.startswith("adam/") for op in phases["optimizer"])
