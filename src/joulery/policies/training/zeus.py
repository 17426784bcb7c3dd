"""Zeus: the power limit of each kind of job that its cost asks for (NSDI'23, section 3.1), at its own batch size."""

from __future__ import annotations

from joulery.domain.errors import ConfigError
from joulery.perf.power.training_power import POWER_LIMITS, JobClass, limited


def zeus_limits(classes: tuple[JobClass, ...], board_w: float, eta: float = 0.5) -> dict[str, float]:
    """The limit of each class, as a share of the board's, that minimises ``eta · energy + (1 - eta) · board · time``.

    Args:
        classes: The jobs, at full power.
        board_w: Power limit of the board, W (MAXPOWER).
        eta: 1 minds energy alone, 0 time alone.

    Raises:
        ConfigError: ``eta`` is no share.
    """
    if not 0 <= eta <= 1:
        raise ConfigError("eta weighs energy against time", got=str(eta), expected="0 to 1")

    def cost(job: JobClass) -> float:
        return job.time_ratio * (eta * job.gpu_w + (1.0 - eta) * board_w)

    chosen = {}
    for job in classes:
        menu = {1.0: job} | {
            ratio: limited((job,), ratio)[0] for ratio in POWER_LIMITS if job.name in POWER_LIMITS[ratio]
        }
        chosen[job.name] = min(menu, key=lambda ratio: (cost(menu[ratio]), -ratio))
    return chosen
