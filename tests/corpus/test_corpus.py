"""Programs as people write and publish them, unchanged, under the tracer: steps by kind, phases, names.

Each script of ``scripts`` is written as the public examples of its kind are; none knows of joulery. Expected are the
steps that its loops make, and every matrix product below a module: losses written as functions have none.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from joulery.adapters.tracers.torch import TorchTracer
from joulery.domain.trace.tracing import Steps
from joulery.store.run.directory import open_run
from joulery.store.run.tensors import kept_footprint

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'joulery[torch]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("corpus")]

from joulery.adapters.tracers.inject.torch_recorder import TorchRecorder  # noqa: E402  # needs torch

SCRIPTS = Path(__file__).with_name("scripts")
PRODUCT = re.compile(r"/(addmm|mm|bmm|baddbmm|convolution|Torch-Compiled Region: .*)(_\d+)?$")
TRAINING = {"forward", "backward", "optimizer"}
CASES = {
    # script: steps of training (of the first optimizer where several take turns), calls of the trained model without
    # gradients in evaluation mode
    "image": (8, 4),
    "text": (8, 0),
    "gan": (6, 0),
    "vae": (10, 0),
    "rl": (6, 0),
    "gnn": (6, 6),
    "diffusion": (8, 0),
    "seq2seq": (6, 0),
    "lora": (6, 0),
    "accumulate": (6, 0),
    "amp": (6, 0),
    "compiled": (6, 0),
    "lightning_fit": (6, 6),
    "hf_loop": (6, 3),
}
STRADDLES = {"gan"}
"""A recorded step begins with gradients of calls before it: those have no name."""
LOADED = {"image": 16, "lightning_fit": 16}
"""Samples of the two recorded steps; all others make their batches themselves, so that it is unknown."""
NEEDS = {"lightning_fit": "lightning", "hf_loop": "transformers"}


def traced(name, folder):
    """Sessions and step counts of a script that was run to its end under the recorder."""
    recorder = TorchRecorder(folder, **asdict(Steps(1, 1, 2, 1)))
    recorder.install()
    try:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    finally:
        recorder.finish()
    tracer = TorchTracer()
    sessions, notes = tracer.recorded(str(folder), None)
    return sessions, notes, tracer.step_counts(str(folder))


@pytest.mark.parametrize("name", CASES)
def test_a_published_program_has_its_steps_and_phases(name, tmp_path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    sessions, notes, counts = traced(name, tmp_path)
    training, evaluation = CASES[name]
    assert (counts.training, counts.evaluation) == (training, evaluation), notes
    trained = [session for session in sessions if session.kind == "training"]
    assert sum(session.steps for session in trained) == 2, notes
    samples = [session.samples for session in trained]
    assert sum(samples) == LOADED[name] if name in LOADED else samples == [None] * len(trained)
    for session in trained:
        found = {session.trace.phases[phase] for phase in session.trace.phase.tolist()}
        assert found >= TRAINING
        paths = products(session)
        assert paths and (name in STRADDLES or not {path for path in paths if path.startswith("<no module>")})


def test_a_jax_program_has_a_step_a_call_of_its_compiled_function(tmp_path) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    line = [sys.executable, "-m", "joulery", "measure", "--meter", "fake:50", "--trace", "jax", "--out", "run"]
    line += ["--steps", "skip=1,warmup=1,active=2,repeat=1", "--", sys.executable, str(SCRIPTS / "jax_fit.py")]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.manifest["tracing"]["step_counts"]["recorded"] == 2
    assert {path.rsplit("/", 1)[-1] for path in kept_footprint(run).op} >= {"dot_general", "tanh", "transpose"}


def products(session):
    """The matrix products and convolutions of the passes, by their paths; a compiled region is one, with all inside."""
    trace = session.trace
    found = set()
    for op, phase in zip(trace.op.tolist(), trace.phase.tolist(), strict=True):
        if trace.phases[phase] in ("forward", "backward") and PRODUCT.search(trace.ops[op]):
            found.add(trace.ops[op])
    return found
