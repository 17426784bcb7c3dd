"""Settings of jobs' power limits, kept apart so that a node agent need not load the parser of site files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from joulery.config.jobs import JobsConfig


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Settings of the power limits of jobs.

    Attributes:
        eta, max_slowdown, min_ratio, trial_s, settle_s, period_s, review_s: Settings of the policy.
        lease_s: How long a limit stays set after its last renewal.
        progress: Folder of the files in which jobs report progress; None for none.
        known: Folder with the measured effects of limits on earlier jobs; None for none.
    """

    eta: float
    max_slowdown: float
    min_ratio: float
    trial_s: float
    settle_s: float
    period_s: float
    review_s: float
    lease_s: float
    progress: str | None = None
    known: str | None = None


def limits_config(jobs: JobsConfig) -> LimitsConfig | None:
    """The settings of a ``jobs`` section; None where its policy sets no limits."""
    from joulery.policies.training.green import LEAN_ETA

    if jobs.policy.kind not in LEAN_ETA:
        return None
    config, slurm = jobs.limits, jobs.slurm
    return LimitsConfig(
        LEAN_ETA[jobs.policy.kind] if config.eta is None else config.eta,
        config.max_slowdown,
        config.min_ratio,
        config.trial_s,
        config.settle_s,
        config.period_s,
        config.review_s,
        config.lease_s,
        progress=None if slurm.progress is None else str(slurm.progress),
        known=None if slurm.meters is None else str(slurm.meters / "limits"),
    )
