"""Why a test may be skipped. Each skip is counted by reason; in CI a skip for any other reason fails the run."""

import re

MACHINE = {
    "root": r"may read everything|needs root",
    "registers": r"this machine has (no /dev/cpu|registers of its own)",
    "no IPv6": r"this machine has no IPv6",
    "no tmpfs": r"no tmpfs here",
    "one core": r"neighbours need two cores",
    "no CPU quota": r"control group|cgroup|may not be written|offers no CPU quota",
    "no Triton": r"no Triton (here|for Python)",
    "no TensorFlow": r"TensorFlow is not installed",
    "no data set": r"the data set is not here",
    "no vLLM": r"vLLM is not installed: make test-vllm",
    "no kubectl": r"kubectl is not installed",
    "no Redis": r"redis-server is not installed",
    "no container engine": r"no container engine here",
}
"""What depends on the machine alone: allowed everywhere, in CI too."""

INSTALL = {
    "no PyTorch": r"(PyTorch|torch) is not installed",
    "no JAX": r"JAX is not installed|jax is not installed",
    "no Transformers or Lightning": r"(transformers|lightning|accelerate)\S* is not installed",
    "no Chromium": r"no Chromium here",
    "no Slurm": r"[Ss]lurm\w* is not installed",
    "no gRPC": r"(grpc|tritonclient)\S* is not installed",
    "no Ray": r"Ray (Serve|Train) is not installed",
    "no llama.cpp": r"(joulery\[llm\]|small language model|prompt encoder) is not installed",
    "no ONNX": r"(onnx|onnxruntime|PIL\.Image) is not installed",
    "no package index": r"no package index here",
    "no curl": r"curl is not installed",
    "no Prometheus": r"Prometheus is not installed",
    "no systemd": r"systemd is not installed",
    "no C++ compiler": r"g\+\+ is not installed",
    "no uvloop": r"uvloop is not installed",
    "no OpenSSL": r"openssl is not installed",
}
"""What a machine may lack at home. ``.ci/run`` installs all of it, so that none of these is allowed there."""


def allowed_as(reason: str, *, ci: bool) -> str | None:
    """The short name under which a reason is allowed; ``None`` when it is not."""
    known = MACHINE if ci else MACHINE | INSTALL
    return next((name for name, pattern in known.items() if re.search(pattern, reason)), None)
