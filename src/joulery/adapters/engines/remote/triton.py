"""Configuration for NVIDIA Triton Inference Server: a plan's instances as model repositories and processes to launch.

A share of a GPU belongs to a process (MPS), so every instance of a plan is a Triton process of its own, started with
``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``; that is how the paper's prototype does it (section 4.3). All instances of a GPU
share one repository, of which each process loads its own model. Where MPS is not available one server may serve the
whole GPU instead: the rate limiter then lets models execute side by side only as far as their shares fit together.

Source: Triton model configuration (``model_config.proto``), dynamic batcher, instance groups, rate limiter.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from joulery.domain.errors import ConfigError
from joulery.domain.serving.tensors import TensorSpec

RESOURCE = "share"
"""The rate limiter's resource: tenths of a per cent of a GPU."""
WHOLE = 1000
_PORTS = 3
"""Ports of one process: HTTP, gRPC and metrics."""
_TYPES = {"BYTES": "TYPE_STRING"}


@dataclass(frozen=True, slots=True)
class TritonModel:
    """One model of a repository.

    Attributes:
        name: What clients call it.
        batch: Largest batch.
        delay_s: How long requests wait for a batch to fill.
        share_ratio: Share of the GPU.
        backend: Triton's backend, such as ``onnxruntime``; empty to have Triton infer it from the model's file.
        gpu: Index of the GPU; None for the CPU.
        inputs, outputs: What it takes and gives, batch dimension included; empty to have Triton read the model.
    """

    name: str
    batch: int
    delay_s: float
    share_ratio: float
    backend: str = ""
    gpu: int | None = 0
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def __post_init__(self) -> None:
        if not (self.batch >= 1 and 0 <= self.delay_s < float("inf") and 0 < self.share_ratio <= 1):
            raise ConfigError(
                "Triton cannot serve this",
                pointer=self.name,
                got=f"batch {self.batch}, delay {self.delay_s:g} s, share {self.share_ratio:g}",
                expected="a batch of 1 or more, a finite delay, a share above 0 and at most 1",
            )


def config_text(model: TritonModel) -> str:
    """The model's ``config.pbtxt``."""
    lines = [f'name: "{model.name}"']
    if model.backend:
        lines.append(f'backend: "{model.backend}"')
    lines.append(f"max_batch_size: {model.batch}")
    for side, specs in (("input", model.inputs), ("output", model.outputs)):
        lines += [_tensor(side, spec) for spec in specs]
    # Without this block Triton never waits, and a batch of 1 has nothing to wait for.
    if model.batch > 1:
        delay_us = round(model.delay_s * 1e6)
        lines.append(
            f"dynamic_batching {{\n  preferred_batch_size: [ {model.batch} ]\n"
            f"  max_queue_delay_microseconds: {delay_us}\n}}"
        )
    place = "kind: KIND_CPU" if model.gpu is None else f"kind: KIND_GPU\n    gpus: [ {model.gpu} ]"
    lines.append(
        f"instance_group [\n  {{\n    count: 1\n    {place}\n    rate_limiter {{\n      resources [\n"
        f'        {{ name: "{RESOURCE}" count: {units(model.share_ratio)} }}\n      ]\n    }}\n  }}\n]'
    )
    return "\n".join(lines) + "\n"


def units(share_ratio: float) -> int:
    """A share in units of the rate limiter, at least 1; rounded down, so that shares that fit still fit."""
    return max(1, int(WHOLE * share_ratio + 1e-6))


def _tensor(side: str, spec: TensorSpec) -> str:
    """A declared tensor; Triton's dimensions leave the batch out."""
    kind = _TYPES.get(spec.datatype, f"TYPE_{spec.datatype}")
    dims = ", ".join(map(str, spec.shape[1:])) or "1"
    return f'{side} [\n  {{ name: "{spec.name}" data_type: {kind} dims: [ {dims} ] }}\n]'


@dataclass(frozen=True, slots=True)
class TritonProcess:
    """One Triton process.

    Attributes:
        repository: Folder of its model repository.
        models: Which models of it to load.
        gpu: Index of its GPU; None for the CPU.
        share_ratio: Share of the GPU's SMs, by MPS; 1 for no limit.
        port: Its HTTP port; gRPC and metrics have the two after it.
        limited: Whether the rate limiter enforces its models' shares.
    """

    repository: str
    models: tuple[str, ...]
    gpu: int | None
    share_ratio: float
    port: int
    limited: bool = False

    def environment(self) -> dict[str, str]:
        """Environment variables that it needs."""
        if self.gpu is None:
            return {}
        found = {"CUDA_VISIBLE_DEVICES": str(self.gpu)}
        if self.share_ratio < 1:
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * self.share_ratio:g}"
        return found

    def arguments(self, program: str = "tritonserver") -> list[str]:
        """Its command line."""
        line = [
            program,
            f"--model-repository={self.repository}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in self.models),
            "--http-address=127.0.0.1",
            f"--http-port={self.port}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self.port + 1}",
            f"--metrics-port={self.port + 2}",
        ]
        if self.limited:
            # One device is visible to the process, and it calls that device 0.
            line += ["--rate-limit=execution_count", f"--rate-limit-resource={RESOURCE}:{WHOLE}:0"]
        return line

    def command(self) -> str:
        """Environment and command line, for a shell."""
        environment = [f"{name}={shlex.quote(value)}" for name, value in self.environment().items()]
        return " ".join([*environment, *map(shlex.quote, self.arguments())])


def processes(models: Sequence[Sequence[TritonModel]], folder: str, port: int = 8000) -> list[TritonProcess]:
    """A process for every model of every GPU, each with its share.

    Args:
        models: By GPU.
        folder: Holds ``gpu0/``, ``gpu1/`` ..., a repository each.
        port: The first port.
    """
    found: list[TritonProcess] = []
    for index, mine in enumerate(models):
        for model in mine:
            at = port + _PORTS * len(found)
            found.append(TritonProcess(f"{folder}/gpu{index}", (model.name,), model.gpu, model.share_ratio, at))
    return found


def one_server_each(models: Sequence[Sequence[TritonModel]], folder: str, port: int = 8000) -> list[TritonProcess]:
    """A process for every GPU, in which the rate limiter keeps the models' shares."""
    return [
        TritonProcess(
            f"{folder}/gpu{index}",
            tuple(model.name for model in mine),
            mine[0].gpu,
            1.0,
            port + _PORTS * index,
            limited=True,
        )
        for index, mine in enumerate(models)
        if mine
    ]
