"""Plans for language models: which model, on how many GPUs of which type, with how many requests at once."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from joulery.domain.quality import Quality


class TokenSlo(NamedTuple):
    """A bound on a quantile of a latency.

    Attributes:
        latency_s: The bound, s.
        quantile_ratio: Which quantile stays below it.
    """

    latency_s: float
    quantile_ratio: float


class SloPart(NamedTuple):
    """A prediction compared with an SLO.

    Attributes:
        name: ``ttft`` (time to first token), ``itl`` (time between tokens) or ``answer`` (the whole answer, mean).
        quantile_ratio: Quantile; None for a mean.
        predicted_s: Predicted latency at the quantile, the margin included, s.
        margin_ratio: Margin kept for the error of the prediction.
        limit_s: The bound, s.
    """

    name: str
    quantile_ratio: float | None
    predicted_s: float
    margin_ratio: float
    limit_s: float

    @property
    def slack_ratio(self) -> float:
        """Share of the bound that is left; below 0 where it is violated."""
        return 1 - self.predicted_s / self.limit_s


@dataclass(frozen=True, slots=True)
class LanguageReplicas:
    """Equal replicas of one variant on one GPU type.

    Attributes:
        service: The service they serve.
        model, precision: The model and the precision of its weights.
        quality_ratio: The user's quality score of that variant; None where none is stated.
        gpu: GPU type, as the fleet calls it.
        gpus: GPUs of one replica.
        count: How many replicas.
        max_num_seqs: Requests one replica runs at once.
        rate_rps: Requests one replica gets a second.
        in_flight: Mean requests in its batch.
        power_w: Mean power of one replica's GPUs, W.
        host_w: Host power charged to one replica's GPUs, W.
        usd_per_hour: Price of one replica.
        energy_per_token_j: Joules of GPUs and host an output token.
        parts: Predictions compared with the SLOs.
        basis: ``measured``, ``fitted`` or ``transferred``.
        error_ratio: Relative error of the joules a token that two of three rows, left out alike, stayed within.
        simulated_s: By SLO, the latency in one replica's simulation with noise, s; empty without a simulation.
    """

    service: str
    model: str
    precision: str
    quality_ratio: float | None
    gpu: str
    gpus: int
    count: int
    max_num_seqs: int
    rate_rps: float
    in_flight: float
    power_w: float
    host_w: float
    usd_per_hour: float
    energy_per_token_j: float
    parts: tuple[SloPart, ...]
    basis: str
    error_ratio: float
    simulated_s: tuple[tuple[str, float], ...] = ()

    @property
    def kept(self) -> bool:
        """Whether the simulation is within every SLO; True without one."""
        limits = {part.name: part.limit_s for part in self.parts}
        return all(seconds <= limits[name] for name, seconds in self.simulated_s)

    @property
    def variant(self) -> str:
        """Model and precision."""
        return f"{self.model} {self.precision}"

    @property
    def command(self) -> str:
        """Command that starts one replica with vLLM."""
        return vllm_command(self.model, self.precision, self.gpus, self.max_num_seqs)

    @property
    def total_w(self) -> float:
        """Power of all replicas, hosts included, W."""
        return self.count * (self.power_w + self.host_w)

    @property
    def total_usd_per_hour(self) -> float:
        """Price of all replicas."""
        return self.count * self.usd_per_hour


class PlannedEngine(NamedTuple):
    """An engine of a plan, as it is started.

    Attributes:
        service: The service it serves.
        model, precision: The model and the precision of its weights.
        gpus: GPUs of one replica, over which the model is spread (tensor parallelism).
        max_num_seqs: Requests one replica runs at once.
        replicas: How many of them.
    """

    service: str
    model: str
    precision: str
    gpus: int
    max_num_seqs: int
    replicas: int


class ServedModel(NamedTuple):
    """A server's report of its configuration.

    Attributes:
        models: Every name that it reports for its models; empty where it reports none.
        gpus: Number of GPUs over which the model is spread; None where not reported.
        max_num_seqs: Requests it runs at once; None where not reported.
        precision: Precision of its weights, as the server names it; empty where not reported.
    """

    models: tuple[str, ...] = ()
    gpus: int | None = None
    max_num_seqs: int | None = None
    precision: str = ""


_DTYPES = frozenset({"bfloat16", "float16", "float32"})


def vllm_command(model: str, precision: str, gpus: int, max_num_seqs: int) -> str:
    """Command that starts a replica with vLLM, as a line for a shell.

    For ``fp8`` the engine quantises the weights, unless the model's name states that they are ``fp8`` already. Other
    precisions, except those that ``--dtype`` names, are those of the model's files and are not in the line.
    """
    arguments = ["vllm", "serve", model, "--tensor-parallel-size", str(gpus), "--max-num-seqs", str(max_num_seqs)]
    if precision in _DTYPES:
        arguments += ["--dtype", precision]
    elif precision == "fp8" and "fp8" not in model.lower():
        arguments += ["--quantization", "fp8"]
    return shlex.join(arguments)


class LanguageAlternative(NamedTuple):
    """The best configuration of a variant on a GPU type for a service.

    Attributes:
        service, model, precision, gpu: The service, the variant and the GPU type.
        gpus: Total number of GPUs; 0 where it is infeasible.
        power_w, usd_per_hour: Total power and price.
        energy_per_token_j: Joules an output token.
        reason: Why it is infeasible; empty where it is feasible.
    """

    service: str
    model: str
    precision: str
    gpu: str
    gpus: int
    power_w: float
    usd_per_hour: float
    energy_per_token_j: float
    reason: str


class LanguageBound(NamedTuple):
    """A lower bound on the objective of any plan within the candidates and the predictor.

    Attributes:
        value: The bound, in the unit of the objective.
        gap_ratio: How far the plan is above it.
    """

    value: float
    gap_ratio: float


class CandidateReplica(NamedTuple):
    """A replica that could be planned, as a linear lower bound of its objective.

    Attributes:
        service, model, precision, gpu, gpus, max_num_seqs: The replica's configuration.
        rate_rps: Highest rate of it within the SLOs.
        fixed: Objective of one replica, without its requests.
        per_rps: Objective of a request a second.
    """

    service: str
    model: str
    precision: str
    gpu: str
    gpus: int
    max_num_seqs: int
    rate_rps: float
    fixed: float
    per_rps: float


class LooserLimit(NamedTuple):
    """Saving of a looser SLO or quality, in fractions of replicas.

    Attributes:
        service: The service.
        what: ``ttft``, ``itl``, ``answer`` (s) or ``quality`` (ratio).
        now, then: The limit as it is, and the looser one.
        saves: Objective, at least, by the prices; by the candidates that come nearest to being chosen.
        model: For quality: the variant that it would let answer.
    """

    service: str
    what: str
    now: float
    then: float
    saves: float
    model: str = ""


@dataclass(frozen=True, slots=True)
class LanguageCertificate:
    """Prices that prove a bound: no replica serves requests for less than they are worth.

    If ``rate_rps * (demand_price - per_rps) <= fixed + gpus * pool_price`` for every candidate, no plan's objective is
    below the value of the rates at their prices, minus that of the available GPUs at theirs.

    Attributes:
        relaxed: The proven bound.
        demand_price: Objective of one more request a second, by service.
        pool_price: Saving of one more GPU, by type; 0 for types without a limit.
        rates_rps: Requests a second, by service.
        available: Available GPUs, by type; types without a limit are not in it.
        candidates: Every candidate that no other one replaces.
        looser: Savings of looser limits.
    """

    relaxed: float
    demand_price: Mapping[str, float]
    pool_price: Mapping[str, float]
    rates_rps: Mapping[str, float]
    available: Mapping[str, int]
    candidates: tuple[CandidateReplica, ...]
    looser: tuple[LooserLimit, ...] = ()


@dataclass(frozen=True, slots=True)
class LanguagePlan:
    """A plan for language models.

    Attributes:
        objective: ``carbon`` (grams an hour), ``energy`` (W) or ``cost`` (dollars an hour).
        replicas: The replicas that run.
        bound: Lower bound on the objective.
        candidates: Number of combinations of variant, GPU type, GPUs and limit that were within their SLO.
        alternatives: The best of each variant and GPU type.
        g_per_kwh: Carbon intensity; None where the site names none.
        pue: Facility energy per IT energy.
        source: Where the measured runs come from.
        notes: Assumptions, as text.
        policy: Name of the planner.
        quality: Always modelled.
        certificate: Prices that prove the bound of the relaxation; None where none were computed.
    """

    objective: str
    replicas: tuple[LanguageReplicas, ...]
    bound: LanguageBound
    candidates: int
    alternatives: tuple[LanguageAlternative, ...]
    g_per_kwh: float | None
    pue: float
    source: str
    notes: tuple[str, ...] = ()
    policy: str = "language"
    quality: Quality = Quality.MODELLED
    certificate: LanguageCertificate | None = None

    @property
    def violations(self) -> tuple[LanguageReplicas, ...]:
        """Replicas whose simulation misses an SLO."""
        return tuple(each for each in self.replicas if not each.kept)

    @property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return sum(each.count * each.gpus for each in self.replicas)

    @property
    def power_w(self) -> float:
        """Power of GPUs and hosts, W, without the facility's."""
        return math.fsum(each.total_w for each in self.replicas)

    @property
    def usd_per_hour(self) -> float:
        """Price of the GPUs."""
        return math.fsum(each.total_usd_per_hour for each in self.replicas)

    @property
    def carbon_g_per_hour(self) -> float | None:
        """Grams an hour, the facility's share included; None without an intensity."""
        return None if self.g_per_kwh is None else self.power_w / 1e3 * self.pue * self.g_per_kwh

    @property
    def objective_value(self) -> float:
        """Value of the objective, in its unit."""
        return {
            "carbon": self.carbon_g_per_hour or 0.0,
            "energy": self.power_w,
            "cost": self.usd_per_hour,
        }[self.objective]
