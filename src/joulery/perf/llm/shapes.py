"""Kernels of the four figures, chosen by cross-validation on the runs of The ML.ENERGY Benchmark v3.

605 runs of vLLM on H100 and B200, NeurIPS Datasets and Benchmarks 2025, Apache-2.0. The choice makes the errors small
on left-out rows, ends of curves, configurations, models and GPU types. Kernels state how similar runs are, not how
fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from joulery.perf.llm.gaussian_process import KernelShape, Term


def llm_shape(of: Mapping[str, float]) -> KernelShape:
    """Create a kernel over points of language models from its parameters by name."""
    return KernelShape(
        offset=of["offset"],
        slope=of["slope"],
        sloped=(0, 1, 3),
        load_slope=of["load_slope"],
        variance=of["shared"],
        length=of["shared_load"],
        lengths=(of["shared_size"], of["shared_size"], of["shared_kv"], of["shared_gpus"], of["shared_precision"]),
        damping={"gpu": of["other_gpu"], "task": of["other_task"]},
        terms=(
            Term(("gpu",), 0.0, of["gpu"], of["gpu_load"]),
            Term(("task",), 0.0, of["task"], of["task_load"]),
            Term(("gpu", "task"), 0.0, of["gpu_task"], of["gpu_task_load"]),
            Term(("backbone",), 0.0, of["backbone"], of["backbone_load"]),
            Term(("backbone", "task"), 0.0, of["backbone_task"], of["backbone_task_load"]),
            Term(("configuration",), of["configuration_level"], of["configuration"], of["configuration_load"], True),
            Term(("series",), of["series_level"], of["series"], of["series_load"], True, of["series_queue"]),
        ),
        noise=of["noise"],
    )


SHAPES: Mapping[str, KernelShape] = MappingProxyType(
    {
        "throughput": llm_shape(
            {
                "offset": 0.136,
                "shared": 0.527,
                "shared_load": 3.43,
                "shared_size": 2.48,
                "shared_kv": 2.47,
                "shared_gpus": 0.717,
                "shared_precision": 1.43,
                "other_gpu": 2.34,
                "other_task": 0.675,
                "gpu": 0.000969,
                "gpu_load": 12.8,
                "task": 0.132,
                "task_load": 7.01,
                "backbone": 0.483,
                "backbone_load": 34.2,
                "backbone_task": 0.027,
                "backbone_task_load": 7.94,
                "configuration_level": 0.00356,
                "configuration": 0.00767,
                "configuration_load": 2.38,
                "series_level": 0.00995,
                "series": 0.00708,
                "series_load": 2.45,
                "noise": 0.00195,
                "series_queue": 0.311,
                "slope": 0.468,
                "load_slope": 0.0112,
                "gpu_task": 0.00281,
                "gpu_task_load": 1.88,
            }
        ),
        "power": llm_shape(
            {
                "offset": 0.216,
                "shared": 0.564,
                "shared_load": 3.64,
                "shared_size": 26.8,
                "shared_kv": 1.65,
                "shared_gpus": 0.533,
                "shared_precision": 0.383,
                "other_gpu": 13.7,
                "other_task": 4.77,
                "gpu": 0.00775,
                "gpu_load": 10.5,
                "task": 0.434,
                "task_load": 5.12,
                "backbone": 0.0171,
                "backbone_load": 1.39,
                "backbone_task": 0.165,
                "backbone_task_load": 52.4,
                "configuration_level": 0.336,
                "configuration": 0.0557,
                "configuration_load": 3.67,
                "series_level": 0.00336,
                "series": 0.0199,
                "series_load": 0.66,
                "noise": 0.000161,
                "series_queue": 1.06,
                "slope": 1.69,
                "load_slope": 0.00102,
                "gpu_task": 0.000779,
                "gpu_task_load": 1.2,
            }
        ),
        "itl_p50": llm_shape(
            {
                "offset": 0.738,
                "shared": 0.683,
                "shared_load": 4.22,
                "shared_size": 1.66,
                "shared_kv": 2.14,
                "shared_gpus": 1.02,
                "shared_precision": 1.24,
                "other_gpu": 2.89,
                "other_task": 0.243,
                "gpu": 0.000429,
                "gpu_load": 7.18,
                "task": 0.0433,
                "task_load": 39.2,
                "backbone": 0.00146,
                "backbone_load": 8.94,
                "backbone_task": 0.00104,
                "backbone_task_load": 5.95,
                "configuration_level": 0.00513,
                "configuration": 0.00776,
                "configuration_load": 1.09,
                "series_level": 0.000821,
                "series": 0.0289,
                "series_load": 2.46,
                "noise": 2.48e-05,
                "series_queue": 0.0525,
                "slope": 0.000511,
                "load_slope": 0.0114,
                "gpu_task": 0.00151,
                "gpu_task_load": 1.41,
            }
        ),
        "itl_p99": llm_shape(
            {
                "offset": 0.456,
                "shared": 0.542,
                "shared_load": 3.47,
                "shared_size": 3.55,
                "shared_kv": 4.24,
                "shared_gpus": 1.0,
                "shared_precision": 0.735,
                "other_gpu": 0.222,
                "other_task": 1.65,
                "gpu": 0.0165,
                "gpu_load": 23.1,
                "task": 0.264,
                "task_load": 67.2,
                "backbone": 0.877,
                "backbone_load": 22.6,
                "backbone_task": 0.0585,
                "backbone_task_load": 1.14,
                "configuration_level": 0.0024,
                "configuration": 8.28e-05,
                "configuration_load": 1.94,
                "series_level": 0.0125,
                "series": 0.0301,
                "series_load": 1.08,
                "noise": 0.000134,
                "series_queue": 0.435,
                "slope": 0.0654,
                "load_slope": 0.0665,
                "gpu_task": 0.00501,
                "gpu_task_load": 2.18,
            }
        ),
    }
)
"""Kernels by figure. The kernel of ``throughput`` is for the token time; the others are for the figures they name."""
