"""Slowdown of co-located inference: Eqs. 1-11 of iGniter (Xu et al., TPDS 34(3), 2023, section 3.1).

The model of one GPU needs three sums over its processes: their number, their power demand and the share of the L2 cache
they use. :class:`Neighbourhood` keeps these sums, so adding or removing a neighbour costs O(1).

Coefficients keep their published units (ms, percent of the SMs, bytes, W, MHz), because plans are compared digit for
digit with the published ones; all results of the planner are in SI units.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality
from joulery.domain.quantile import quantile_of

LARGEST_BATCH = 32
"""Every batch up to this size must have work above 0; it is the paper's largest batch."""


@dataclass(frozen=True, slots=True)
class GpuCoefficients:
    """The seven hardware-specific coefficients (Table 2), and the unit in which shares are given.

    Attributes:
        name: GPU type.
        power_cap_w: P.
        clock_max_mhz: F.
        idle_w: p_idle.
        pcie_bytes_per_ms: B_pcie.
        clock_mhz_per_w: alpha_f, negative: MHz lost per watt above the cap.
        delay_ms_per_neighbour: alpha_sch: launch delay a kernel gains per process on the GPU.
        delay_offset_ms: beta_sch.
        unit_percent: r_unit: smallest step of a share.
    """

    name: str
    power_cap_w: float
    clock_max_mhz: float
    idle_w: float
    pcie_bytes_per_ms: float
    clock_mhz_per_w: float
    delay_ms_per_neighbour: float
    delay_offset_ms: float
    unit_percent: float


@dataclass(frozen=True, slots=True)
class ModelCoefficients:
    """The workload-specific coefficients of one model on one GPU type (Table 2, Eq. 11).

    Attributes:
        load_bytes: d_load, input of one request.
        feedback_bytes: d_feedback, result of one request.
        kernels: n_k.
        launch_ms: n_k k_sch: launch delay of all kernels when alone.
        k1, k2, k3, k4, k5: Eq. 11, with the share in percent and the time in ms.
        power_slope, power_offset_w: Solo power against the processing ability in requests/s.
        cache_slope, cache_offset_percent: Solo L2 utilisation against the processing ability.
        cache_sensitivity: alpha_cache: relative stretch per percent of L2 used by neighbours.
        pcie_contention: Factor on both transfers when the GPU is shared; 1 in the paper's model.
        shared_launch_ms: Launch delay of all kernels added as soon as the GPU is shared; 0 in the paper's model.
    """

    load_bytes: float
    feedback_bytes: float
    kernels: float
    launch_ms: float
    k1: float
    k2: float
    k3: float
    k4: float
    k5: float
    power_slope: float
    power_offset_w: float
    cache_slope: float
    cache_offset_percent: float
    cache_sensitivity: float
    pcie_contention: float = 1.0
    shared_launch_ms: float = 0.0


class Solo(NamedTuple):
    """Figures of a model alone with one batch size and one share (Eq. 11 and the two lines below it).

    Attributes:
        active_ms: k_act.
        power_w: p.
        cache_percent: c.
    """

    active_ms: float
    power_w: float
    cache_percent: float


class Neighbourhood(NamedTuple):
    """The sums over a GPU's processes that affect each of them: number, power and cache use.

    Attributes:
        processes: Number of processes.
        power_w: Sum of their solo power.
        cache_percent: Sum of their solo L2 utilisation.
    """

    processes: int = 0
    power_w: float = 0.0
    cache_percent: float = 0.0

    def with_process(self, solo: Solo) -> Neighbourhood:
        """Add one process to the sums; O(1)."""
        return Neighbourhood(self.processes + 1, self.power_w + solo.power_w, self.cache_percent + solo.cache_percent)


class Latency(NamedTuple):
    """Predicted times of one batch, ms (Eqs. 1-4)."""

    load_ms: float
    schedule_ms: float
    active_ms: float
    gpu_ms: float
    feedback_ms: float

    @property
    def total_ms(self) -> float:
        """t_inf (Eq. 1)."""
        return self.load_ms + self.gpu_ms + self.feedback_ms

    def throughput_rps(self, batch: int) -> float:
        """h (Eq. 2): loading overlaps with execution and feedback of the batch before."""
        return 1000.0 * batch / (self.gpu_ms + self.feedback_ms)


def solo(model: ModelCoefficients, batch: float, share_percent: float) -> Solo:
    """k_act, p and c of a model running alone (Eq. 11)."""
    active_ms = work(model, batch) / (share_percent + model.k4) + model.k5
    ability_rps = 1000.0 * batch / active_ms
    return Solo(
        active_ms,
        model.power_slope * ability_rps + model.power_offset_w,
        model.cache_slope * ability_rps + model.cache_offset_percent,
    )


def work(model: ModelCoefficients, batch: float) -> float:
    """gamma = k1 b^2 + k2 b + k3, ms percent (Theorem 1)."""
    return model.k1 * batch * batch + model.k2 * batch + model.k3


def demand_w(gpu: GpuCoefficients, around: Neighbourhood) -> float:
    """Power demand of the whole GPU (Eq. 10)."""
    return gpu.idle_w + around.power_w


def clock_mhz(gpu: GpuCoefficients, around: Neighbourhood) -> float:
    """Clock under the power cap (Eq. 9); never above the maximum. May be <= 0 for an absurd demand."""
    excess_w = demand_w(gpu, around) - gpu.power_cap_w
    return gpu.clock_max_mhz if excess_w <= 0 else gpu.clock_max_mhz + gpu.clock_mhz_per_w * excess_w


def launch_delay_ms(gpu: GpuCoefficients, count: int) -> float:
    """Delay every kernel gains from ``count`` processes on the GPU (Eq. 6)."""
    return 0.0 if count <= 1 else gpu.delay_ms_per_neighbour * count + gpu.delay_offset_ms


def colocated_latency(
    gpu: GpuCoefficients, model: ModelCoefficients, batch: int, own: Solo, around: Neighbourhood
) -> Latency:
    """Times of one batch of a process on its GPU (Eqs. 1-8).

    Args:
        gpu: Hardware coefficients.
        model: Model coefficients.
        batch: Batch size.
        own: The process alone, from :func:`solo`.
        around: The whole GPU, the process itself included.

    Returns:
        The predicted times; infinite when the demand for power leaves no clock at all.
    """
    shared = around.processes > 1
    transfer = (model.pcie_contention if shared else 1.0) * batch / gpu.pcie_bytes_per_ms
    schedule_ms = model.launch_ms + model.kernels * launch_delay_ms(gpu, around.processes)
    if shared:
        schedule_ms += model.shared_launch_ms
    active_ms = own.active_ms * (1 + model.cache_sensitivity * (around.cache_percent - own.cache_percent))
    clock = clock_mhz(gpu, around)
    gpu_ms = (schedule_ms + active_ms) * (gpu.clock_max_mhz / clock) if clock > 0 else float("inf")
    return Latency(model.load_bytes * transfer, schedule_ms, active_ms, gpu_ms, model.feedback_bytes * transfer)


@dataclass(frozen=True, slots=True)
class ModelFit:
    """Errors of one model's coefficients against a set of measurements.

    Attributes:
        model: The model.
        data: The measurements: ``solo``, ``pairs``, or ``held-out pairs``, which are not part of the fit.
        error_ratio: Predicted over measured, minus 1, one a measurement, in the order of the measurements.
    """

    model: str
    data: str
    error_ratio: tuple[float, ...]

    @property
    def mape_ratio(self) -> float:
        """Mean absolute relative error."""
        return math.fsum(map(abs, self.error_ratio)) / len(self.error_ratio)

    @property
    def bias_ratio(self) -> float:
        """Mean relative error."""
        return math.fsum(self.error_ratio) / len(self.error_ratio)

    @property
    def max_ratio(self) -> float:
        """Largest absolute relative error."""
        return max(map(abs, self.error_ratio))

    def quantile_ratio(self, quantile: float) -> float:
        """Quantile of the absolute relative errors, interpolated linearly between measurements."""
        return quantile_of(map(abs, self.error_ratio), quantile)


@dataclass(frozen=True, slots=True)
class InterferenceProfile:
    """All coefficients of the predictor for one GPU type.

    Attributes:
        gpu: Hardware coefficients.
        models: Coefficients by model name.
        form: ``igniter`` (the paper's) or ``calibrated`` (co-location terms fitted on measured pairs).
        source: Origin of the coefficients, as text.
        quality: Measured here, modelled, or assumed.
        fits: Fit quality; empty when the coefficients were typed in.
        notes: Estimated values, as text.
        bands: Published coefficients: how much longer 1 measurement in 20 took than predicted, by model, where the
            measurements themselves are not part of the profile.
    """

    gpu: GpuCoefficients
    models: Mapping[str, ModelCoefficients]
    form: str = "igniter"
    source: str = ""
    quality: Quality = Quality.MODELLED
    fits: tuple[ModelFit, ...] = ()
    notes: tuple[str, ...] = ()
    bands: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def error_band(self, model: str, quantile: float = 0.95) -> float:
        """Excess of a model's latencies over predictions: a quantile of measured over predicted, minus 1.

        It is the worst of the kinds of data that the profile was compared with; 0 where it was compared with none.

        Args:
            model: The model.
            quantile: Which quantile of the measurements.
        """
        bands = [0.0]
        for fit in self.fits:
            if fit.model == model and fit.error_ratio:
                longer = [1.0 / (1.0 + error) - 1.0 if error > -1 else math.inf for error in fit.error_ratio]
                bands.append(quantile_of(longer, quantile))
        return max(bands)

    def __getitem__(self, model: str) -> ModelCoefficients:
        """Coefficients of a model.

        Raises:
            ConfigError: The profile does not contain the model.
        """
        if model not in self.models:
            near = difflib.get_close_matches(model, self.models, n=2)
            raise ConfigError(
                f"no coefficients for model {model!r} on {self.gpu.name}",
                got=model,
                expected=", ".join(sorted(self.models)) or "a profile with at least one model",
                hint=(f"did you mean {' or '.join(near)}? " if near else "")
                + f"measure it with `joulery profile {model}=MODEL --mps 0 --inputs ONE.npz -o FILE` "
                "(MODEL: an ONNX file or module:function), then name FILE under fleet.gpus as profile_file",
            )
        return self.models[model]
