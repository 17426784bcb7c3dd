"""Report of the savings of another scheduler on past jobs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from joulery.app.past_jobs import BASE, LearnedRatio, Savings, SiteSavings, Spread, scheme

_RESIZED = "Every job is resized; live only those whose owners give a range are (--keep-gpus: none)."


@dataclass(frozen=True, slots=True)
class SavingsReport:
    """The savings on one cluster.

    Attributes:
        savings: The simulated savings.
        reported_kg: Carbon of the same jobs in the report, kg; NaN where it has none.
        site: Known facts of the site's own machines; None where they are not reported.
    """

    savings: Savings
    reported_kg: float
    site: SiteSavings | None = None

    def document(self) -> dict[str, Any]:
        """The report as a JSON-ready object."""
        changes = ("cluster_carbon", "cluster_energy", "job_carbon", "mean_jct", "p99_jct")
        return {
            "policy": self.savings.policy,
            "against": BASE,
            "quality": "simulated",
            "runs_as": scheme(self.savings.policy).runs_as or None,
            "worse_in": self._losses(),
            "jobs": self.savings.jobs,
            "gpus": self.savings.gpus,
            "keeps_gpus": self.savings.keeps_gpus,
            "samples": self.savings.samples,
            "draws": self.savings.samples,
            **self._machines(),
            **{f"{name}_change_ratio": asdict(getattr(self.savings, name)) for name in changes},
            "job_carbon_saved_kg": {
                end: -getattr(self.savings.job_carbon, other) * self.reported_kg
                for end, other in (("mean", "mean"), ("low", "high"), ("high", "low"))
            },
        }

    def text(self) -> str:
        """The report as a few lines of text."""
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
            "Every job keeps the GPUs that it had." if saved.keeps_gpus else _RESIZED,
        ]
        if self.site is not None:
            power = self.site.power
            basis = _basis(power.measured, power.learned, power.assumed)
            lines.append(f"Power of jobs: {basis}; their scaling: {self._scaling()}; {self._nodes()}.")
            if (limits := self.site.limits) is not None and limits.measured:
                lines.append(f"What power limits do to them: {limits.measured} measured, {limits.assumed} assumed.")
            lines += self._learned()
            if saved.energy_by_type:
                types = ", ".join(f"{name} {_percent(change).strip()}" for name, change in saved.energy_by_type.items())
                stay = "Jobs stay on the type they ran on."
                if self.site.moved:
                    stay = f"{self.site.moved} jobs that named no type run on any of known speed, the others on theirs."
                lines.append(f"Energy by GPU type, idle nodes included: {types}. {stay}")
            if (lost := saved.fragmented) is not None:
                lines.append(
                    f"Placed on nodes; {100 * lost.mean:.1f} % of the GPU time is free, scattered, and holds no job."
                )
            if power.implausible:
                lines.append(f"{power.implausible} measurements below 10 or above 3000 W per GPU are left out.")
        if losses := self._losses():
            lines.append(f"{saved.policy} is worse in: {', '.join(losses)}.")
        lines.append(f"{saved.policy}: {scheme(saved.policy).live}.")
        return "\n".join(lines)

    def _nodes(self) -> str:
        """The nodes, as text."""
        assert self.site is not None
        if not self.site.groups:
            return f"nodes of {self.site.node_gpus} GPUs"
        return " and ".join(f"{group.nodes} nodes of {group.node.gpus} {group.type}" for group in self.site.groups)

    def _machines(self) -> dict[str, Any]:
        """Nodes, and the basis of the jobs' power and speed-up."""
        if self.site is None:
            return {}
        power = self.site.power
        jobs = {"measured": power.measured, "learned": power.learned, "assumed": power.assumed}
        groups = [{"type": one.type, "nodes": one.nodes, "gpus": one.node.gpus} for one in self.site.groups]
        changes = {name: asdict(change) for name, change in self.savings.energy_by_type.items()}
        return {"node_gpus": None if groups else self.site.node_gpus, "groups": groups,
                "energy_by_type_change_ratio": changes, "power_of_jobs": jobs, "implausible_power": power.implausible,
                **self._speeds(), "placed": self.savings.fragmented is not None,
                "fragmented_ratio": None if self.savings.fragmented is None else asdict(self.savings.fragmented),
                }  # fmt: skip

    def _scaling(self) -> str:
        """The basis of the jobs' scaling, as text."""
        speed = None if self.site is None else self.site.speed
        return "all assumed" if speed is None else _basis(speed.measured, speed.learned, speed.assumed)

    def _learned(self) -> list[str]:
        """Facts learned of GPU types, and whether ended jobs confirm what is learned from their names."""
        speed = None if self.site is None else self.site.speed
        if speed is None:
            return []
        lines = []
        reference = next((name for name, known in speed.types.items() if known.ratio == known.low == 1.0), "")
        for name, known in speed.types.items():
            if name != reference:
                lines.append(f"Speed of {name}: {_ratio(known)} x that of {reference}.")
        tests = (("run time", speed.run_times), ("power", speed.powers))
        coverages = [f"{name} of {test.inside} of {test.checked}" for name, test in tests if test.checked]
        if coverages:
            doubt = any(test.reliable is False for _, test in tests)
            lines.append(
                f"Back-test: {', '.join(coverages)} ended jobs lies in the 90 % interval of earlier jobs of their kind"
                + ("; that is less than chance explains: jobs of one name differ here." if doubt else ".")
            )
        return lines

    def _speeds(self) -> dict[str, Any]:
        """The basis of the jobs' speed, JSON-ready."""
        speed = None if self.site is None else self.site.speed
        if speed is None:
            return {"speedup_of_jobs": "assumed"}
        jobs = {"measured": speed.measured, "learned": speed.learned, "assumed": speed.assumed}
        known = speed.measured + speed.learned
        return {
            "speedup_of_jobs": "assumed" if not known else "learned" if speed.assumed == 0 else "partly learned",
            "scaling_of_jobs": {**jobs, "kinds": speed.kinds},
            "gpu_types": {name: _jsonable(asdict(ratio)) for name, ratio in speed.types.items()},
            "gpu_types_power": {name: _jsonable(asdict(ratio)) for name, ratio in speed.type_watts.items()},
            "limits_of_jobs": self._limits(),
            "jobs_on_any_type": 0 if self.site is None else self.site.moved,
            "backtest": {"run_time": asdict(speed.run_times), "power": asdict(speed.powers)},
        }

    def _limits(self) -> dict[str, int] | None:
        """Number of jobs whose response to power limits was measured, JSON-ready."""
        limits = None if self.site is None else self.site.limits
        return None if limits is None else {"measured": limits.measured, "assumed": limits.assumed}

    def _losses(self) -> list[str]:
        """The figures that the scheduler makes worse."""
        named = {
            "cluster_carbon": "cluster CO2e", "cluster_energy": "cluster energy", "job_carbon": "CO2e of the jobs",
            "mean_jct": "mean completion time", "p99_jct": "p99 completion time",
        }  # fmt: skip
        return [text for name, text in named.items() if getattr(self.savings, name).mean > 0]

    def _grams(self) -> str:
        change = self.savings.job_carbon
        low, high = -change.high * self.reported_kg, -change.low * self.reported_kg
        return f"{low:.3g} to {high:.3g} kg less of the {self.reported_kg:.3g} kg above"


def _basis(measured: int, learned: int, assumed: int) -> str:
    if not measured and not learned:
        return "all assumed"
    return f"{measured} measured, {learned} learned from the same owner and name, {assumed} assumed"


def _ratio(known: LearnedRatio) -> str:
    kinds = f"{known.kinds} kind{'s' if known.kinds > 1 else ''}, {known.jobs} jobs"
    return f"{known.ratio:.2f} ({known.low:.2f} to {known.high:.2f}; {known.basis} from {kinds})"


def _jsonable(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value != value else value for name, value in fields.items()}


def _percent(change: Spread) -> str:
    return f"{100 * change.mean:+6.1f} % ({100 * change.low:+.1f} to {100 * change.high:+.1f} %)"
