"""Power and scaling of training jobs: speed and power by number of GPUs (GREEN, NSDI'25, sections 4 and 5.1).

Measured inputs: single-GPU power of an A40, the same die as the RTX 3090, as a share of its limit (Zeus, NSDI'23);
busy fraction against placement on T4 nodes (Pollux, OSDI'21 artifact). The combination is a model: ``modelled``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, readonly
from joulery.domain.errors import ConfigError

RTX3090_W = 350.0
"""Power limit of the board."""


@dataclass(frozen=True, slots=True, eq=False)
class JobClass:
    """One kind of training job.

    Attributes:
        name: Model and data set.
        gpu_w: GPU power of a job on one GPU, W.
        busy_ratio: Share of the time each GPU computes rather than waits, with 1, 2, … GPUs, float64[max GPUs];
            1 on one GPU. The speed-up on n GPUs is ``n · busy_ratio[n - 1] / time_ratio``.
        time_ratio: Time a step takes against that at full power; above 1 under a power limit.
        measured_as: The measured class whose response to power limits and to wider batches it has; itself when empty.
        board_w: Power limit of the boards it runs on, W.
        limits: Measured effects of power limits on its jobs: the limit as a share of the board's, step time and GPU
            power against full power. Each takes precedence over that of the measured class.
    """

    name: str
    gpu_w: float
    busy_ratio: FloatArray
    time_ratio: float = 1.0
    measured_as: str = ""
    board_w: float = RTX3090_W
    limits: tuple[tuple[float, float, float], ...] = ()

    @property
    def measured_name(self) -> str:
        """Name of the measured class whose responses it has."""
        return self.measured_as or self.name

    def __post_init__(self) -> None:
        ratios = readonly(self.busy_ratio, np.float64)
        if len(ratios) == 0 or ratios[0] != 1.0 or not bool(np.all((ratios > 0) & (ratios <= 1))):
            raise ConfigError("busy ratios start at 1 and stay in (0, 1]", pointer=self.name, got=str(ratios.tolist()))
        object.__setattr__(self, "busy_ratio", ratios)


@dataclass(frozen=True, slots=True)
class NodePower:
    """Power of one kind of node beside its computing GPUs.

    Attributes:
        gpus: GPUs per node.
        waiting_gpu_w: Power of a GPU while its process waits for other GPUs.
        idle_gpu_w: Power of a GPU without a process.
        cpu_w: CPU power that each busy GPU causes.
        static_w: Power of everything else in the node, always on.
        asleep_w: Power of a suspended node.
    """

    gpus: int = 2
    waiting_gpu_w: float = 90.0
    idle_gpu_w: float = 25.0
    cpu_w: float = 60.0
    static_w: float = 120.0
    asleep_w: float = 10.0

    @property
    def idle_share_w(self) -> float:
        """Power of one idle GPU of an awake node, with its share of the node."""
        return self.idle_gpu_w + self.static_w / self.gpus


@dataclass(frozen=True, slots=True, eq=False)
class PowerTable:
    """Power and speed of every job class on 0 … max GPUs; row = class, column = number of GPUs.

    Attributes:
        classes: The job classes.
        speedup: Work done a second, in seconds of one GPU, float64[classes, max + 1].
        gpu_w: Power of one of its GPUs, W, same shape.
        job_w: ``P_gpu + P_cpu + P_static`` of the whole job, W, same shape.
        degradation: Efficiency on n GPUs over that on one (Eq. 4), clamped to [0.05, 1], same shape; 1 at n = 0.
    """

    classes: tuple[JobClass, ...]
    speedup: FloatArray
    gpu_w: FloatArray
    job_w: FloatArray
    degradation: FloatArray


def power_table(classes: tuple[JobClass, ...], node: NodePower) -> PowerTable:
    """Tabulate the model ``P_gpu(m, n) = P_wait + (P_1(m) - P_wait) u(m, n)``; a share of the node for each GPU.

    Raises:
        ConfigError: There are no classes, or they cover different numbers of GPUs.
    """
    if not classes or len({len(job.busy_ratio) for job in classes}) != 1:
        raise ConfigError("job classes must all know the same numbers of GPUs")
    busy = np.array([job.busy_ratio for job in classes])
    single_w = np.array([job.gpu_w for job in classes])[:, None]
    gpus = np.arange(1, busy.shape[1] + 1)
    floor_w = np.minimum(node.waiting_gpu_w, single_w)
    gpu_w = floor_w + (single_w - floor_w) * busy
    job_w = gpus * (gpu_w + node.cpu_w + node.static_w / node.gpus)
    speedup = gpus * busy / np.array([job.time_ratio for job in classes])[:, None]
    relative = (speedup / job_w) / (speedup[:, :1] / job_w[:, :1])
    return PowerTable(
        classes,
        speedup=_with_zero(speedup, 0.0),
        gpu_w=_with_zero(gpu_w, 0.0),
        job_w=_with_zero(job_w, 0.0),
        degradation=_with_zero(np.clip(relative, 0.05, 1.0), 1.0),
    )


def on_boards(classes: tuple[JobClass, ...], limit_w: float, speed_ratio: float) -> tuple[JobClass, ...]:
    """Convert classes to GPUs of another type: same share of the board's power limit, speed times ``speed_ratio``.

    Args:
        classes: The classes on their own boards.
        limit_w: Power limit of the other boards, W.
        speed_ratio: Their speed over that of the boards on which durations are stated.
    """
    return tuple(
        job
        if job.board_w == limit_w and speed_ratio == 1.0
        else replace(
            job, gpu_w=job.gpu_w * (limit_w / job.board_w), board_w=limit_w, time_ratio=job.time_ratio / speed_ratio
        )
        for job in classes
    )


def stacked(tables: Sequence[PowerTable]) -> PowerTable:
    """Join the rows of several tables into one, in order; a single table is returned as it is.

    Raises:
        ConfigError: The tables cover different numbers of GPUs.
    """
    if len(tables) == 1:
        return tables[0]
    if len({table.speedup.shape[1] for table in tables}) != 1:
        raise ConfigError("power tables must all know the same numbers of GPUs")
    columns = ("speedup", "gpu_w", "job_w", "degradation")
    return PowerTable(
        tuple(job for table in tables for job in table.classes),
        **{name: _frozen(np.concatenate([getattr(table, name) for table in tables])) for name in columns},
    )


def widened(classes: tuple[JobClass, ...], gpus: int) -> tuple[JobClass, ...]:
    """Extend classes to ``gpus`` GPUs: each GPU beyond the measured ones is as busy as the last measured one."""

    def wider(job: JobClass) -> JobClass:
        more = gpus - len(job.busy_ratio)
        return (
            replace(job, busy_ratio=np.append(job.busy_ratio, np.full(more, job.busy_ratio[-1]))) if more > 0 else job
        )

    return tuple(wider(job) for job in classes)


def _with_zero(column: npt.NDArray[np.float64], first: float) -> FloatArray:
    return _frozen(np.concatenate((np.full((len(column), 1), first), column), axis=1))


def _frozen(table: npt.NDArray[np.float64]) -> FloatArray:
    table.flags.writeable = False
    return table


_VISION = (1.0, 0.898, 0.686, 0.729, 0.759, 0.828, 0.729, 0.759)
_IMAGENET = (1.0, 0.993, 0.837, 0.724, 0.862, 0.838, 0.823, 0.824)
_SPEECH = (1.0, 0.942, 0.806, 0.723, 0.839, 0.829, 0.797, 0.718)
_BERT = (1.0, 0.987, 0.387, 0.335, 0.521, 0.473, 0.449, 0.457)
_NCF = (1.0, 0.761, 0.328, 0.278, 0.395, 0.365, 0.303, 0.373)

RTX3090_CLASSES: tuple[JobClass, ...] = (
    JobClass("resnet50-imagenet", 0.814 * RTX3090_W, np.array(_IMAGENET)),
    JobClass("resnet18-cifar", 0.743 * RTX3090_W, np.array(_VISION)),
    JobClass("shufflenet-cifar", 0.478 * RTX3090_W, np.array(_VISION)),
    JobClass("deepspeech2", 0.591 * RTX3090_W, np.array(_SPEECH)),
    JobClass("ncf", 0.280 * RTX3090_W, np.array(_NCF)),
    JobClass("bert-squad", 0.891 * RTX3090_W, np.array(_BERT)),
    JobClass("bert-sentiment", 0.923 * RTX3090_W, np.array(_BERT)),
    JobClass("gpt2", 0.891 * RTX3090_W, np.array(_BERT)),
)
"""Eight job classes on RTX 3090 nodes of two GPUs (placements 2, 12, 22 …): share of the power limit × 350 W.

No measurement of GPT-2's scaling or power exists: it is given BERT's.
"""

POWER_LIMITS: Mapping[float, Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        0.917: {
            "resnet50-imagenet": (1.010, 0.945), "resnet18-cifar": (1.0, 1.0), "shufflenet-cifar": (1.0, 0.990),
            "deepspeech2": (1.0, 1.0), "ncf": (1.0, 1.0), "bert-squad": (1.004, 0.941),
            "bert-sentiment": (1.004, 0.941), "gpt2": (1.004, 0.941),
        },
        0.833: {
            "resnet50-imagenet": (1.017, 0.885), "resnet18-cifar": (1.0, 1.0), "shufflenet-cifar": (1.0, 0.977),
            "deepspeech2": (1.0, 0.951), "ncf": (1.0, 1.0), "bert-squad": (1.028, 0.869),
            "bert-sentiment": (1.023, 0.876), "gpt2": (1.028, 0.869),
        },
        0.75: {
            "resnet50-imagenet": (1.033, 0.812), "resnet18-cifar": (1.015, 0.948), "shufflenet-cifar": (1.0, 0.960),
            "deepspeech2": (1.016, 0.915), "ncf": (1.0, 1.0), "bert-squad": (1.064, 0.787),
            "bert-sentiment": (1.065, 0.793), "gpt2": (1.064, 0.787),
        },
        0.667: {
            "resnet50-imagenet": (1.068, 0.734), "resnet18-cifar": (1.037, 0.872), "shufflenet-cifar": (1.0, 0.948),
            "deepspeech2": (1.034, 0.849), "ncf": (1.0, 1.0), "bert-squad": (1.130, 0.707),
            "bert-sentiment": (1.113, 0.713), "gpt2": (1.130, 0.707),
        },
        0.583: {
            "resnet50-imagenet": (1.194, 0.659), "resnet18-cifar": (1.055, 0.781), "shufflenet-cifar": (1.0, 0.948),
            "deepspeech2": (1.060, 0.781), "ncf": (1.0, 1.0), "bert-squad": (1.272, 0.626),
            "bert-sentiment": (1.272, 0.626), "gpt2": (1.272, 0.626),
        },
        0.5: {
            "resnet50-imagenet": (1.644, 0.591), "resnet18-cifar": (1.195, 0.674), "shufflenet-cifar": (1.0, 0.948),
            "deepspeech2": (1.333, 0.716), "ncf": (1.0, 1.0), "bert-squad": (1.744, 0.545),
            "bert-sentiment": (1.478, 0.540), "gpt2": (1.744, 0.545),
        },
    }
)  # fmt: skip
"""Under a power limit (as a share of the board's): step time and GPU power of each class against full power.

Measured on an A40 at 275, 250, 225, 200, 175 and 150 of 300 W (Zeus, NSDI'23, power-limit sweeps at the batch sizes
behind ``RTX3090_CLASSES``; ResNet-18 has the ratios of ShuffleNet at batch 512, GPT-2 those of BERT, BERT on
Sentiment140 those of SQuAD where it was not run: 275 and 175 W; ratios within noise of 1 set to 1).
"""


def limited(classes: tuple[JobClass, ...], limit_ratio: float | Mapping[str, float]) -> tuple[JobClass, ...]:
    """Apply a power limit of ``POWER_LIMITS`` to classes, one for all or by name; 1 and unnamed classes do not change.

    Raises:
        ConfigError: No measurement of the limit or of a class under it.
    """
    ratios = limit_ratio if isinstance(limit_ratio, Mapping) else dict.fromkeys((c.name for c in classes), limit_ratio)
    return tuple(_limited(job, ratios.get(job.name, 1.0)) for job in classes)


def limit_responses(job: JobClass) -> dict[float, tuple[float, float]]:
    """Step time and GPU power of a class under each of its known power limits, against full power."""
    name = job.measured_name
    known = {ratio: by_name[name] for ratio, by_name in POWER_LIMITS.items() if name in by_name}
    return known | {ratio: (time_ratio, power_ratio) for ratio, time_ratio, power_ratio in job.limits}


def _limited(job: JobClass, ratio: float) -> JobClass:
    if ratio == 1.0:
        return job
    measured = limit_responses(job).get(ratio)
    if measured is None:
        known = ", ".join(f"{limit:g}" for limit in POWER_LIMITS)
        raise ConfigError(
            "no measurement under this power limit", got=f"{ratio:g} for {job.name}", expected=f"1, {known}"
        )
    time_ratio, power_ratio = measured
    return replace(job, gpu_w=job.gpu_w * power_ratio, time_ratio=job.time_ratio * time_ratio)
