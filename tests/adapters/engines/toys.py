"""Models for tests of the engine and the gateway; workers load them as ``tests.adapters.engines.toys:NAME``."""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]


def echo(inputs: Arrays) -> Arrays:
    return dict(inputs)


def double(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 2}


double.inputs = [("x", "FP32", (-1, 2))]  # type: ignore[attr-defined]
double.outputs = [("y", "FP32", (-1, 2))]  # type: ignore[attr-defined]


def slow(inputs: Arrays) -> Arrays:
    """Sleeps for the seconds it is given."""
    time.sleep(float(inputs["seconds"].ravel()[0]))
    return {"pid": np.array([os.getpid()])}


def busy(inputs: Arrays) -> Arrays:
    """Burns the CPU seconds it is given."""
    end_s = time.process_time() + float(inputs["seconds"].ravel()[0])
    while time.process_time() < end_s:
        pass
    return {"pid": np.array([os.getpid()])}


def who(inputs: Arrays) -> Arrays:
    return {"pid": np.array([os.getpid()]), "cores": np.array(sorted(os.sched_getaffinity(0)))}


def environment(inputs: Arrays) -> Arrays:
    return {"threads": np.array([int(os.environ["OMP_NUM_THREADS"])])}


def gpu(inputs: Arrays) -> Arrays:
    """Where it runs."""
    found = {name: os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")}
    time.sleep(float(inputs["seconds"].ravel()[0]) if "seconds" in inputs else 0.0)
    return {name: np.frombuffer(value.encode(), np.uint8) for name, value in found.items()}


def shared(inputs: Arrays) -> Arrays:
    """Takes as long as a batch would on its share of a slow GPU: Eq. 11 with invented coefficients."""
    share = float(os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
    time.sleep((0.4 * len(inputs["x"]) + 8.0) / (share + 2.0) * 40e-3)
    return {"y": inputs["x"][:, :2]}


def fails(inputs: Arrays) -> Arrays:
    raise RuntimeError("no luck\ntoday")


def picky(inputs: Arrays) -> Arrays:
    raise ValueError("too small")


def bad_return(inputs: Arrays) -> Any:
    return [1, 2]


def complex_return(inputs: Arrays) -> Arrays:
    return {"z": np.array([1j])}


def noisy(inputs: Arrays) -> Arrays:
    print("to the terminal")
    print("an error", file=sys.stderr)
    return {"y": np.array([1])}


def dies(inputs: Arrays) -> Arrays:
    """Dies on every request."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def dies_once(inputs: Arrays) -> Arrays:
    """Dies on a request whose file does not exist yet."""
    flag = inputs["flag"].ravel()[0].decode()
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return {"pid": np.array([os.getpid()])}
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leaves_a_child(inputs: Arrays) -> Arrays:
    """Forks a child that keeps the pipe open, then dies."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    if inputs["die"].any():
        os.kill(os.getpid(), signal.SIGKILL)
    return {"child": np.array([pid])}


class Gated:
    """Says who it is; cannot be loaded while the file ``gate`` is locked."""

    def __init__(self, gate: str) -> None:
        with Path(gate).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)

    def __call__(self, inputs: Arrays) -> Arrays:
        return {"pid": np.array([os.getpid()])}


class Scaled:
    """A model with state, made once a replica."""

    inputs = (("x", "FP64", (-1,)),)
    outputs = (("y", "FP64", (-1,)), ("calls", "INT64", (1,)))

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.calls = 0

    def __call__(self, inputs: Arrays) -> Arrays:
        self.calls += 1
        return {"y": inputs["x"] * self.factor, "calls": np.array([self.calls])}


def with_options(inputs: Arrays, *, offset: float) -> Arrays:
    return {"y": inputs["x"] + offset}


def undeclared(inputs: Arrays) -> Arrays:
    return {}


undeclared.inputs = [("x", "FP31", (1,))]  # type: ignore[attr-defined]


class CannotBeMade:
    def __init__(self) -> None:
        raise RuntimeError("no weights")


not_callable = 7


def rows(inputs: Arrays) -> Arrays:
    """Says how many rows it was given at once, after a moment in which others can queue."""
    time.sleep(0.05)
    x = inputs["x"]
    if (x < 0).any():
        raise ValueError("negative")
    return {"y": x * 2, "together": np.full(len(x), len(x))}


def totals(inputs: Arrays) -> Arrays:
    """One number whatever the number of rows: it cannot be cut apart."""
    return {"sum": np.sum(inputs["x"], keepdims=False)[None]}
