"""The claims of GREEN's paper (NSDI'25, section 8, appendix A), each with the result of the same comparison here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from joulery.domain.format import percent
from reproduce.claim import Claim
from reproduce.green.figures import GreenFigures, PolicyOutcome

SIZES = ("extra small, below 10 min", "small, below 1 h", "medium, below 10 h", "large")
"""Names of the sizes of jobs."""
TABLE_2 = ((-0.5, -0.4), (1.7, 1.2), (4.4, 4.8), (6.9, 5.8))
TABLE_3 = ((-0.1, -0.3), (2.4, 4.7), (5.5, 8.0), (5.9, 6.1))
"""Increase of the mean and the tail completion time against Tiresias by size, %."""
TABLE_4 = (
    (17.56, 45.20, 15.88),
    (19.91, 48.89, 18.38),
    (18.53, 46.57, 16.71),
    (18.30, 47.15, 18.52),
    (17.19, 44.99, 18.93),
)
"""Mean and tail completion time, h, and CO2e, kg: GREEN, one GPU, two GPUs, GPU hours as the factor, no shifting."""


def changes(
    ones: Sequence[PolicyOutcome], policy: str, against: str, of: Callable[[PolicyOutcome], float]
) -> list[float]:
    """Relative change of one policy against another in each region that ran both; empty when one was not run."""
    mine = {one.region: of(one) for one in ones if one.policy == policy}
    theirs = {one.region: of(one) for one in ones if one.policy == against}
    return [mine[region] / theirs[region] - 1.0 for region in mine if region in theirs]


def claims(made: GreenFigures) -> tuple[Claim, ...]:
    """Compare every claim that has a number in the paper's text with joulery's figure."""
    found = [*_day(made.day), *_small(made.small), *_year(made.year), *_sizes(made), *_table_4(made.ablations)]
    return (*found, *_sensitivity(made), *_frontier(made))


def signed_percent(ratio: float) -> str:
    """Format a relative change as a percentage with its sign."""
    return f"{100 * ratio:+.1f} %"


def _day(day: Sequence[PolicyOutcome]) -> list[Claim]:
    def green(against: str, of: Callable[[PolicyOutcome], float], policy: str = "green-paper") -> list[float]:
        return changes(day, policy, against, of)

    eco = green("ecovisor", _kg, "green")
    both = _two(float(np.mean(eco)), min(eco)) if eco else "not run"
    verdict = _verdict(float(np.mean(eco)), -0.322) if eco else ""
    return [
        Claim("Fig. 8", "CO2e against EcoVisor: mean, best region", "-32.2 %, -41.2 %", both, verdict),
        _claim("Fig. 8", "mean JCT against GAIA", -0.252, green("gaia", _jct)),
        _claim("Fig. 8", "CO2e against Tiresias", -0.32, green("tiresias", _kg)),
        _claim("Fig. 8", "CO2e against Tiresias, no shifting", -0.21, green("tiresias", _kg, "green-paper:mu=1")),
        _claim("Fig. 8", "mean JCT against Tiresias", 0.048, green("tiresias", _jct), cost=True),
        _claim("Fig. 8", "p99 JCT against Tiresias", 0.061, green("tiresias", _p99), cost=True),
        _claim("Fig. 9", "energy against GPUs as requested", -0.25, green("tiresias-requested", _kwh)),
        _claim("Fig. 9", "peak power against GPUs as requested", -0.125, green("tiresias-requested", _peak)),
        _ours("Fig. 8", "green-lean, CO2e against Tiresias", green("tiresias", _kg, "green-lean")),
        _ours("Fig. 8", "green-lean, mean JCT against Tiresias", green("tiresias", _jct, "green-lean")),
    ]


def _small(small: Sequence[PolicyOutcome]) -> list[Claim]:
    return [
        _claim("Fig. 11", "CO2e against Pollux", -0.239, changes(small, "green-paper", "pollux", _kg)),
        _claim("Fig. 11", "mean JCT against Pollux", 0.172, changes(small, "green-paper", "pollux", _jct), cost=True),
        _claim("Fig. 11", "p99 JCT against Pollux", 0.134, changes(small, "green-paper", "pollux", _p99), cost=True),
        _claim("Fig. 11", "CO2e against Zeus", -0.127, changes(small, "green-paper", "zeus", _kg)),
        _ours("Fig. 11", "green-lean, CO2e against Pollux", changes(small, "green-lean", "pollux", _kg)),
        _ours("Fig. 11", "green-lean, CO2e against Zeus", changes(small, "green-lean", "zeus", _kg)),
    ]


def _year(year: Sequence[PolicyOutcome]) -> list[Claim]:
    return [
        _claim("Fig. 12", "CO2e against Tiresias", -0.316, changes(year, "green", "tiresias", _kg)),
        _claim("Fig. 12", "mean JCT against Tiresias", 0.051, changes(year, "green", "tiresias", _jct), cost=True),
        _claim("Fig. 12", "p99 JCT against Tiresias", 0.075, changes(year, "green", "tiresias", _p99), cost=True),
        _claim("Fig. 12", "CO2e against Pollux", -0.211, changes(year, "green", "pollux", _kg)),
        _claim("Fig. 12", "mean JCT against Pollux", 0.15, changes(year, "green", "pollux", _jct), cost=True),
        _ours("Fig. 12", "green-lean, CO2e against Tiresias", changes(year, "green-lean", "tiresias", _kg)),
        _ours("Fig. 12", "green-lean, mean JCT against Tiresias", changes(year, "green-lean", "tiresias", _jct)),
        _ours("Fig. 12", "lean, CO2e against Tiresias", changes(year, "lean", "tiresias", _kg)),
        _ours("Fig. 12", "lean, mean JCT against Tiresias", changes(year, "lean", "tiresias", _jct)),
    ]


def _sizes(made: GreenFigures) -> list[Claim]:
    found = []
    for name, ones, paper, policy in (
        ("Table 2", made.day, TABLE_2, "green-paper"),
        ("Table 3", made.year, TABLE_3, "green"),
    ):
        for at, (size, (mean, tail)) in enumerate(zip(SIZES, paper, strict=True)):
            ours = [float(np.nanmean(_of_size(ones, policy, key, at))) for key in ("size_mean_s", "size_p99_s")]
            text = "none of this size" if any(map(np.isnan, ours)) else _two(*ours)
            found.append(Claim(name, f"JCT of jobs {size}: mean, tail", f"{mean:+.1f} %, {tail:+.1f} %", text, ""))
    return found


def _of_size(ones: Sequence[PolicyOutcome], policy: str, key: str, at: int) -> list[float]:
    return changes(ones, policy, "tiresias", lambda one: float(getattr(one, key)[at]))


def _table_4(ones: Sequence[PolicyOutcome]) -> list[Claim]:
    names = ("one GPU", "two GPUs", "GPU hours instead of carbon", "no shifting")
    green, found = ones[0], []
    for name, one, row in zip(names, ones[1:], TABLE_4[1:], strict=True):
        paper = [row[0] / TABLE_4[0][0] - 1, row[2] / TABLE_4[0][2] - 1]
        ours = [one.mean_jct_s / green.mean_jct_s - 1, one.cluster_kg / green.cluster_kg - 1]
        found.append(
            Claim("Table 4", f"{name}: mean JCT, CO2e", _two(*paper), _two(*ours), _verdict(ours[1], paper[1]))
        )
    return found


def _sensitivity(made: GreenFigures) -> list[Claim]:
    base = made.mus[0].job_kg
    by_mu = ", ".join(signed_percent(one.job_kg / base - 1) for one in made.mus[1:])
    first = made.quanta[0][1]
    by_quantum = ", ".join(signed_percent(one.mean_jct_s / first.mean_jct_s - 1) for _, one in made.quanta[1:])
    return [
        Claim("Fig. 13a", "CO2e of jobs at mu 1.5, 2, 3 against 1", "2 is best", by_mu, ""),
        Claim("Fig. 13b", "mean JCT at 30 and 60 min against 15", "little", by_quantum, ""),
    ]


def _frontier(made: GreenFigures) -> list[Claim]:
    lean = next(one for one in made.frontier if one.policy == "lean")
    base = next(one for one in made.frontier if one.policy == "tiresias")
    bound = bound_at(made, lean.mean_jct_s)
    reached = (
        (base.cluster_kg - lean.cluster_kg) / (base.cluster_kg - bound) if base.cluster_kg > bound else float("nan")
    )
    what = "lean against Tiresias: CO2e, mean JCT, p99"
    ours = ", ".join(signed_percent(of(lean) / of(base) - 1) for of in (_kg, _jct, _p99))
    near = f"{signed_percent(lean.cluster_kg / bound - 1)} above it; {percent(reached, 0)} of the possible saving"
    return [
        Claim("frontier", what, "aim: -15 %, +5 %, +8 %", ours, ""),
        Claim("frontier", "lean against the bound at its JCT, no job waiting", "", near, ""),
    ]


def bound_at(made: GreenFigures, mean_jct_s: float) -> float:
    """Lower bound on the cluster's carbon, kg, at a mean completion time, when no job waits for a cleaner hour."""
    curve = sorted((point.mean_jct_s, point.cluster_kg) for point in made.bound_at_once)
    return float(np.interp(mean_jct_s, [x for x, _ in curve], [y for _, y in curve]))


def _jct(one: PolicyOutcome) -> float:
    return one.mean_jct_s


def _kg(one: PolicyOutcome) -> float:
    return one.cluster_kg


def _kwh(one: PolicyOutcome) -> float:
    return one.cluster_kwh


def _peak(one: PolicyOutcome) -> float:
    return one.peak_w


def _p99(one: PolicyOutcome) -> float:
    return one.p99_jct_s


def _claim(figure: str, what: str, paper: float, ours: Sequence[float], *, cost: bool = False) -> Claim:
    if not ours:
        return Claim(figure, what, signed_percent(paper), "not run", "")
    mean = float(np.mean(ours))
    spread = f" ({signed_percent(min(ours))} to {signed_percent(max(ours))})" if len(ours) > 1 else ""
    verdict = ("holds" if mean <= paper + 0.03 else "costs more") if cost else _verdict(mean, paper)
    return Claim(figure, what, signed_percent(paper), signed_percent(mean) + spread, verdict)


def _ours(figure: str, what: str, ours: Sequence[float]) -> Claim:
    return Claim(figure, what, "", signed_percent(float(np.mean(ours))) if ours else "not run", "")


def _verdict(ours: float, paper: float) -> str:
    if ours * paper <= 0 or abs(ours) < 0.005:
        return "does not hold"
    return "holds" if abs(ours) >= 0.75 * abs(paper) else "sign only"


def _two(first: float, second: float) -> str:
    return f"{signed_percent(float(first))}, {signed_percent(float(second))}"
