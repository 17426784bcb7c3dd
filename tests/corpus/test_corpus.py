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
    # script: steps of training (of the first optimizer where several take turns), calls of the trained model, or of its
    # average, without gradients in evaluation mode
    "vision/image": (8, 4),
    "vision/unet": (6, 0),
    "vision/detector": (8, 4),
    "vision/transformer": (6, 0),
    "vision/contrastive": (6, 0),
    "vision/siamese": (6, 0),
    "vision/style_transfer": (8, 0),
    "vision/adversarial": (6, 0),
    "vision/distilled": (8, 0),
    "language/text": (8, 0),
    "language/seq2seq": (6, 0),
    "language/lora": (6, 0),
    "language/gpt": (6, 3),
    "language/word2vec": (8, 0),
    "language/speech": (6, 0),
    "language/prompt_tuned": (8, 0),
    "language/preferences": (8, 0),
    "generative/gan": (6, 0),
    "generative/gradient_penalty": (10, 0),
    "generative/vae": (10, 0),
    "generative/vae_by_methods": (8, 0),
    "generative/diffusion": (8, 10),
    "generative/flow": (8, 0),
    "generative/autoencoder": (6, 0),
    "learning/rl": (6, 0),
    "learning/dqn": (9, 0),
    "learning/soft_actor_critic": (11, 5),
    "learning/ppo": (8, 0),
    "learning/maml": (6, 0),
    "learning/gnn": (6, 6),
    "learning/gaussian_process": (8, 1),
    "learning/reptile": (15, 0),
    "learning/reptile_copies": (20, 0),
    "learning/physics": (8, 0),
    "learning/forecast": (6, 0),
    "learning/ensemble": (6, 0),
    "loops/accumulate": (6, 0),
    "loops/accumulate_evaluated": (8, 7),
    "loops/amp": (6, 0),
    "loops/checkpointed": (6, 0),
    "loops/compiled": (6, 0),
    "loops/compiled_step": (6, 0),
    "loops/cross_validated": (12, 4),
    "loops/early_stopping": (12, 6),
    "loops/resumed": (10, 0),
    "loops/scripted": (6, 0),
    "loops/two_stages": (18, 0),
    "loops/in_a_thread": (8, 0),
    "loops/validated_with_gradients": (10, 9),
    "loops/workers": (6, 0),
    "optimizers/averaged": (8, 0),
    "optimizers/changed": (10, 0),
    "optimizers/ema": (8, 0),
    "optimizers/in_backward": (8, 0),
    "optimizers/lbfgs": (6, 0),
    "optimizers/lookahead": (8, 0),
    "optimizers/perturbation": (8, 0),
    "optimizers/own": (8, 0),
    "optimizers/sharpness_aware": (6, 0),
    "optimizers/sparse_and_dense": (6, 0),
    "libraries/accelerated": (6, 0),
    "libraries/ddp": (6, 0),
    "libraries/fsdp": (6, 0),
    "libraries/hf_loop": (6, 3),
    "libraries/hf_trainer": (8, 4),
    "libraries/lightning_by_hand": (6, 0),
    "libraries/lightning_fit": (6, 6),
}
STRADDLES = {"generative/gan", "libraries/lightning_by_hand", "optimizers/in_backward"}
"""A recorded step begins with gradients of calls before it: those have no name."""
OUTSIDE = {"loops/compiled_step", "vision/contrastive", "vision/style_transfer"}
"""They multiply matrices outside every module, or compile a function around the module."""
LOADED = {
    "vision/image": 16,
    "loops/workers": 8,
    "libraries/accelerated": 16,
    "libraries/hf_trainer": 16,
    "libraries/lightning_by_hand": 16,
    "libraries/lightning_fit": 16,
}
"""Samples of the two recorded steps; all others make their batches themselves, so that it is unknown."""
NEEDS = {
    "libraries/accelerated": "accelerate",
    "libraries/hf_loop": "transformers",
    "libraries/hf_trainer": "accelerate",
    "libraries/lightning_by_hand": "lightning",
    "libraries/lightning_fit": "lightning",
}


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
    if name in LOADED:
        assert sum(samples) == LOADED[name]
    else:
        assert samples == [None] * len(trained)
    for session in trained:
        found = {session.trace.phases[phase] for phase in session.trace.phase.tolist()}
        assert found >= TRAINING
        paths = products(session)
        assert paths and (name in STRADDLES | OUTSIDE or not {path for path in paths if path.startswith("<no module>")})


@pytest.mark.parametrize(("name", "calls"), [("language/embeddings", 10), ("loops/inference", 10)])
def test_a_program_that_only_infers_has_a_step_a_call(name, calls, tmp_path) -> None:
    sessions, notes, counts = traced(name, tmp_path)
    assert (counts.training, counts.evaluation) == (0, calls), notes
    assert [session.kind for session in sessions] == ["evaluation"] and sessions[0].steps == 2
    assert products(sessions[0]) and not {path for path in products(sessions[0]) if path.startswith("<no module>")}


@pytest.mark.parametrize(("name", "calls"), [("loops/by_hand", 10), ("loops/functional", 10)])
def test_a_program_without_an_optimizer_has_a_step_a_call(name, calls, tmp_path) -> None:
    sessions, notes, counts = traced(name, tmp_path)
    assert (counts.training, counts.evaluation, counts.other) == (0, 0, calls), notes
    assert sum(session.steps for session in sessions) == 2, notes
    found = {session.trace.phases[phase] for session in sessions for phase in session.trace.phase.tolist()}
    assert found >= {"forward", "backward"}


def test_the_parts_of_a_model_that_its_methods_call_have_its_name(tmp_path) -> None:
    sessions, _, _ = traced("generative/vae_by_methods", tmp_path)
    paths = {path for session in sessions for path in products(session)}
    assert paths and {path.split("/")[0] for path in paths} == {"VAE"}


@pytest.mark.parametrize(("name", "training", "other"), [("jax_fit", 8, 0), ("jax_augmented", 8, 6)])
def test_a_jax_program_has_a_step_a_call_of_the_function_that_differentiates(name, training, other, tmp_path) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    line = [sys.executable, "-m", "joulery", "measure", "--meter", "fake:50", "--trace", "jax", "--out", "run"]
    line += ["--steps", "skip=1,warmup=1,active=2,repeat=1", "--", sys.executable, str(SCRIPTS / f"{name}.py")]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    counts = run.manifest["tracing"]["step_counts"]
    assert (counts["training"], counts["other"]) == (training, other)
    footprint = kept_footprint(run)
    # A transposition may be folded into a product, or take no time that the profiler sees.
    assert {path.rsplit("/", 1)[-1] for path in footprint.op} >= {"dot_general", "tanh"}
    assert not [path for path in footprint.op if "jax_recorder" in path]


def products(session):
    """The matrix products and convolutions of the passes, by their paths; a compiled region is one, with all inside."""
    trace = session.trace
    found = set()
    for op, phase in zip(trace.op.tolist(), trace.phase.tolist(), strict=True):
        if trace.phases[phase] in ("forward", "backward") and PRODUCT.search(trace.ops[op]):
            found.add(trace.ops[op])
    return found
