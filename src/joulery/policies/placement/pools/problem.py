"""Input of the pool optimiser: GPUs that can be partitioned, services that can run on the slices, and prices.

A layout of one GPU is its MIG partition, its clock, and the variant and service on each slice. MIG slices do not
disturb one another, so layouts of the same partition differ only in what their instances add. Counting partitions and
instances is therefore equivalent to counting layouts, and needs some dozens of whole numbers, not thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.arrays import FloatArray, readonly
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.mig import MigMenu
from joulery.perf.power.clock_curves import ClockModel
from joulery.perf.queues.pull_costs import ServiceCosts, VariantCosts
from joulery.policies.serving.objective import Objective

SEVENTHS = 7
"""Compute slices of the GPUs that services' costs are profiled on."""
_LEAST_WEIGHT = 1e-6
"""Weight of energy where carbon is free: of two equal in accuracy the one with fewer joules is still preferred."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU type at one clock.

    Attributes:
        gpu: The type; machines of one type at several clocks share its count.
        menu: The MIG partitions it can have.
        idle_w: Its idle power.
        available: Number of GPUs of the type; None for no limit.
        clock_mhz: The clock; None for the one at which the costs were found.
        time_ratio: Device time against that in the services' costs.
        energy_ratio: Dynamic joules of a request against those in the costs.
    """

    gpu: str
    menu: MigMenu
    idle_w: float
    available: int | None = None
    clock_mhz: float | None = None
    time_ratio: float = 1.0
    energy_ratio: float = 1.0

    @property
    def label(self) -> str:
        """Type, and clock where there is a choice."""
        return self.gpu if self.clock_mhz is None else f"{self.gpu} at {self.clock_mhz:g} MHz"


@dataclass(frozen=True, slots=True)
class PoolService:
    """One service of the pool.

    Attributes:
        name: Unique in the pool.
        costs: What its requests cost.
        rate_rps: Demand.
        limit_s: The latency that ``quantile`` of the requests must keep.
        base_accuracy_ratio: Accuracy of the most accurate variant alone.
        minimum_accuracy_ratio: Mean accuracy never to go below.
        accuracy_price_j: Joules a request that one unit of accuracy is worth, in the problem's weight of energy.
        quantile: Quantile of the latencies that ``limit_s`` limits.
    """

    name: str
    costs: ServiceCosts
    rate_rps: float
    limit_s: float
    base_accuracy_ratio: float
    minimum_accuracy_ratio: float = 0.0
    accuracy_price_j: float = 0.0
    quantile: float = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Everything one instance of a service can be: a variant on a slice of a machine.

    Attributes:
        machine: Index of the machine, in order.
        profile: The slice.
        variant: The variant.
        host_s: Host part of a request, float64[edges].
        gpu_s: Device part of a request of mean size.
        joules: Dynamic joules of a request.
        accuracy_ratio: Accuracy.
    """

    machine: tuple[int, ...]
    profile: tuple[str, ...]
    variant: tuple[str, ...]
    host_s: FloatArray
    gpu_s: FloatArray
    joules: FloatArray
    accuracy_ratio: FloatArray

    def __len__(self) -> int:
        return len(self.machine)


@dataclass(frozen=True, slots=True)
class PoolProblem:
    """Input of a pool plan.

    Attributes:
        machines: GPU types, at each clock that may be chosen.
        services: What is served.
        colocate: Whether services may share a GPU; a group of GPUs each when not.
        energy_weight: Weight of a joule against the services' prices of accuracy.
        most_gpus: GPUs in all, at most; None for no such limit.

    Raises:
        ConfigError: There is no machine or service, or two services share a name.
    """

    machines: tuple[Machine, ...]
    services: tuple[PoolService, ...]
    colocate: bool = False
    energy_weight: float = 1.0
    most_gpus: int | None = None

    def __post_init__(self) -> None:
        if not self.machines or not self.services:
            raise ConfigError("a pool needs at least one GPU type and one service")
        names = [service.name for service in self.services]
        if len(set(names)) < len(names):
            raise ConfigError("names of services must differ", got=", ".join(names))

    @property
    def available(self) -> dict[str, int | None]:
        """Number of GPUs of each type."""
        return {machine.gpu: machine.available for machine in self.machines}


def edges_of(service: PoolService, machines: Sequence[Machine]) -> Edges:
    """Every instance the service can have, without variants that do not fit a slice's memory.

    Raises:
        InfeasibleError: No variant fits any slice.
    """
    found = [
        (index, profile.name, variant, ratio)
        for index, machine in enumerate(machines)
        for profile in machine.menu.profiles
        for variant in service.costs.variants
        if (ratio := slowdown(variant, machine.menu, profile.name)) is not None
    ]
    if not found:
        raise InfeasibleError(f"no variant of {service.name} fits any slice", binding="memory")
    each = [(variant, machines[index], ratio) for index, _, variant, ratio in found]
    return Edges(
        machine=tuple(index for index, *_ in found),
        profile=tuple(profile for _, profile, *_ in found),
        variant=tuple(variant.name for *_, variant, _ in found),
        host_s=_array(variant.host_s for variant, _, _ in each),
        gpu_s=_array(variant.gpu_s * ratio * machine.time_ratio for variant, machine, ratio in each),
        joules=_array(variant.dynamic_j * machine.energy_ratio for variant, machine, _ in each),
        accuracy_ratio=_array(variant.accuracy_ratio for variant, _, _ in each),
    )


def slowdown(variant: VariantCosts, menu: MigMenu, profile: str) -> float | None:
    """Ratio of the device time on a slice to that on the whole GPU; None where the variant does not fit.

    A slice of a GPU that was not profiled is taken to slow a variant down as the same part of the profiled one does
    (``3g`` of an H100 as ``3g`` of an A100; in between, interpolated): an assumption, as is that what fits the smaller
    memory fits the larger.
    """
    if profile in variant.slowdown:
        return variant.slowdown[profile]
    part = menu[profile].compute_slices / menu.compute_slices
    known = sorted((_part(name), ratio) for name, ratio in variant.slowdown.items())
    if part < known[0][0] - 1e-9:
        return None
    parts, ratios = np.array(known).T
    return float(np.exp(np.interp(np.log(part), np.log(parts), np.log(ratios))))


def _part(profile: str) -> float:
    """The part of a GPU of seven slices that a profile's name states: ``3g.20gb`` is 3/7."""
    return int(profile.partition("g")[0]) / SEVENTHS


def prices(objective: Objective, g_per_kwh: float) -> tuple[float, float]:
    """Weight of a joule and price of accuracy under which the cheapest pool is the one of the greatest Eq. 3.

    Eq. 3 is a constant minus these two times joules a request and accuracy lost, over the joules of the baseline.

    Returns:
        ``energy_weight`` and ``accuracy_price_j``.
    """
    dirt = objective.pue * max(g_per_kwh, 0.0) / (objective.base_pue * objective.base_g_per_kwh)
    worth = (1.0 - objective.lambda_ratio) * objective.base_energy_j / objective.base_accuracy_ratio
    return max(objective.lambda_ratio * dirt, _LEAST_WEIGHT), worth


def nearby_ratio(gpus: int, instances: int, host_gpus: int) -> float:
    """The part of an instance's neighbours that are on its own host, on average over the instances.

    A service's contention was found on one host; busy instances on other hosts do not slow it.

    Args:
        gpus: GPUs of the pool, host after host, instances spread evenly.
        instances: Instances on them.
        host_gpus: GPUs of a full host.
    """
    if gpus <= host_gpus or instances <= 1:
        return 1.0
    full, rest = divmod(gpus, host_gpus)
    together = (full * host_gpus**2 + rest**2) / gpus  # GPUs on the host of a GPU, on average
    return float(np.clip((together * instances / gpus - 1.0) / (instances - 1.0), 0.0, 1.0))


def _array(values: Iterable[float]) -> FloatArray:
    return readonly(list(values), np.float64)


def at_clocks(machine: Machine, model: ClockModel, levels: int) -> tuple[Machine, ...]:
    """The machine at several clocks, highest first; the clock is one more choice of a layout.

    Device time is taken to grow as the clock falls (nothing of it waits for memory: the cautious reading), dynamic
    joules to follow the square of the voltage, idle power the emulator's idle curve. All of it modelled.

    Args:
        machine: At its highest clock.
        model: The emulated GPU type.
        levels: How many clocks, from the highest down to the voltage's knee; 1 leaves the machine as it is.
    """
    if levels <= 1:
        return (machine,)
    clocks = np.linspace(model.max_mhz, model.knee_mhz, levels)
    idle = model.idle_power_w(clocks) / model.idle_power_w(model.max_mhz)
    voltage = model.voltage_ratio(clocks)
    return tuple(
        replace(
            machine,
            clock_mhz=float(mhz),
            idle_w=machine.idle_w * float(idle[at]),
            time_ratio=machine.time_ratio * model.max_mhz / float(mhz),
            energy_ratio=machine.energy_ratio * float(voltage[at]) ** 2,
        )
        for at, mhz in enumerate(clocks.tolist())
    )
