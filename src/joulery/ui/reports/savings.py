"""Report of the savings of another scheduler on past jobs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from joulery.app.past_jobs import PastReport, held_gpus, hourly_from
from joulery.domain.errors import ConfigError, DataError
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.savings import BASE, Savings, Spread, most_at_once, savings
from joulery.sim.training.study import scheme


@dataclass(frozen=True, slots=True)
class SavingsReport:
    """The savings on one cluster.

    Attributes:
        savings: As simulated.
        reported_kg: Carbon of the same jobs in the report, kg; NaN where it has none.
    """

    savings: Savings
    reported_kg: float

    def document(self) -> dict[str, Any]:
        """JSON-ready."""
        changes = ("cluster_carbon", "cluster_energy", "job_carbon", "mean_jct", "p99_jct")
        return {
            "policy": self.savings.policy,
            "against": BASE,
            "quality": "simulated",
            "jobs": self.savings.jobs,
            "gpus": self.savings.gpus,
            "samples": self.savings.samples,
            "draws": self.savings.samples,
            **{f"{name}_change_ratio": asdict(getattr(self.savings, name)) for name in changes},
            "job_carbon_saved_kg": {
                end: -getattr(self.savings.job_carbon, other) * self.reported_kg
                for end, other in (("mean", "mean"), ("low", "high"), ("high", "low"))
            },
        }

    def text(self) -> str:
        """A few lines."""
        saved = self.savings
        lines = [
            f"What {saved.policy} would have changed ({scheme(saved.policy).about}), simulated on {saved.gpus} GPUs:",
            f"  cluster CO2e          {_percent(saved.cluster_carbon)}   idle nodes included",
            f"  cluster energy        {_percent(saved.cluster_energy)}",
            f"  CO2e of the jobs      {_percent(saved.job_carbon)}   {self._grams()}",
            f"  mean completion time  {_percent(saved.mean_jct)}",
            f"  p99 completion time   {_percent(saved.p99_jct)}",
            f"against first come, first served on the GPUs asked for; nine in ten of {saved.samples} samples of",
            "what the log does not record (kind of each job, cost of a restart) lie within the brackets.",
        ]
        return "\n".join(lines)

    def _grams(self) -> str:
        change = self.savings.job_carbon
        low, high = -change.high * self.reported_kg, -change.low * self.reported_kg
        return f"{low:.3g} to {high:.3g} kg less of the {self.reported_kg:.3g} kg above"


def savings_report(report: PastReport, policy: str, gpus: int | None, samples: int) -> SavingsReport:
    """Simulate the report's jobs under another scheduler.

    Raises:
        ConfigError: No such scheduler, or no source of intensity was named.
        DataError: No job held a GPU, one held more than there are, or the intensity has holes.
    """
    if report.intensity is None:
        raise ConfigError("grams need an intensity", pointer="--what-if", hint="name a source with --zone or --carbon")
    scheme(policy)
    held = held_gpus(report.jobs)
    at_once = most_at_once(held.start_s, held.elapsed_s, held.gpus)
    if gpus is not None and gpus < int(held.gpus.max()):
        raise DataError(f"a job held {int(held.gpus.max())} GPUs", hint=f"--gpus {at_once} or more")
    carbon = Intensity(hourly_from(report.intensity, held.first_s))
    found = savings(
        held.submit_s, held.elapsed_s, held.gpus, carbon, policy, at_once if gpus is None else gpus, samples
    )
    return SavingsReport(found, report.total.carbon_g / 1e3)


def _percent(change: Spread) -> str:
    return f"{100 * change.mean:+6.1f} % ({100 * change.low:+.1f} to {100 * change.high:+.1f} %)"
