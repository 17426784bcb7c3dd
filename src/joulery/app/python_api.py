"""``joulery.plan``, ``simulate``, ``account`` and ``report``: the commands of these names as functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from joulery.domain.errors import ConfigError

if TYPE_CHECKING:
    from joulery.app.planning.plans import SitePlan
    from joulery.app.simulation import ScenarioResult
    from joulery.config import Site
    from joulery.domain.energy.footprint import Footprint
    from joulery.domain.energy.tensor_footprint import TensorFootprint


def plan(
    site: str | Path | Site,
    *,
    preset: str | None = None,
    compare: Sequence[str] = (),
    running: str | Path | None = None,
    g_per_kwh: float | None = None,
) -> SitePlan:
    """Plan how many GPUs the services of a site need and which of them share one; nothing is started.

    ::

        made = joulery.plan("examples/igniter-12.yaml", compare=["igniter"])
        print(made.document()["gpus"])

    Args:
        site: Path of the site file, or a loaded site.
        preset: Planning policy; the site's when None.
        compare: Other policies to plan with.
        running: Plan file of the running plan, to compare with.
        g_per_kwh: Carbon intensity for layouts; the services' own when None.

    Raises:
        ConfigError: The site file or an argument is wrong.
        InfeasibleError: No plan meets the constraints.
        CapabilityError: A solver is missing (``pip install 'joulery[plan]'``).
    """
    from joulery.app.planning.plans import PlanOptions, plan_site
    from joulery.config import load

    read = load(site) if isinstance(site, str | Path) else site
    where = None if running is None else Path(running)
    return plan_site(read, PlanOptions(preset, tuple(compare), where, g_per_kwh=g_per_kwh))


def simulate(
    scenario: str | Path, *, policies: Sequence[str] = (), seeds: int | None = None, **inputs: str | Path
) -> ScenarioResult:
    """Run a scenario in virtual time, comparing policies on the same requests or jobs.

    Args:
        scenario: The scenario file.
        policies: Policies to compare; the file's when empty.
        seeds: Number of random seeds; the file's when None.
        inputs: Inputs of the scenario's kind, by the names of the flags (``carbon="grid.csv"``).

    Returns:
        The outcome; its ``document`` holds every figure, JSON-ready.

    Raises:
        ConfigError, DataError: The scenario or an input is wrong.
    """
    from joulery.app.simulation import Overrides, run_scenario
    from joulery.config.scenario import load_scenario

    given = {name: str(value) for name, value in inputs.items()}
    return run_scenario(load_scenario(scenario), Overrides(tuple(policies), seeds, given), lambda done, total: None)


def account(
    events: str | Path,
    power: str | Path,
    *,
    zone: str | None = None,
    carbon: str | Path | None = None,
    window_ns: tuple[int, int] | None = None,
) -> TensorFootprint:
    """Charge recorded power to recorded operations: joules by operation, device and phase.

    Args:
        events: A trace of PyTorch, TensorFlow, JAX or XLA, or a CSV file.
        power: A CSV file ``t_ns,device`` with ``power_w`` or ``counter_j``.
        zone, carbon: Carbon intensity, as for :func:`joulery.measure`.
        window_ns: Start and end of the accounted session on the clock of the files; the span of both when None.

    Raises:
        DataError: A file cannot be used, or the two files do not overlap in time.
        ConfigError: The intensity is wrong.
    """
    from joulery.app.measuring import open_carbon
    from joulery.app.runs.accounts import AccountSettings, account_files

    given = {name: str(value) for name, value in (("zone", zone), ("carbon", carbon)) if value is not None}
    return account_files(Path(events), Path(power), AccountSettings(window_ns, carbon=open_carbon(given))).footprint


def report(*runs: str | Path, zone: str | None = None, carbon: str | Path | None = None) -> Footprint:
    """Total energy and carbon of recorded runs.

    Args:
        runs: Run directories; each counts once.
        zone, carbon: Another carbon intensity to price measured runs with, as for :func:`joulery.measure`.

    Raises:
        ConfigError: No run is named, or one is named twice.
        DataError: A directory holds no run, or the grams of two count different things.
    """
    from joulery.app.measuring import open_carbon
    from joulery.app.runs.recorded import load_run

    if not runs:
        raise ConfigError("no run is named", expected="the path of a run directory")
    given = {name: str(value) for name, value in (("zone", zone), ("carbon", carbon)) if value is not None}
    source = open_carbon(given)
    views = [load_run(run, carbon=source) for run in runs]
    names = [view.name for view in views]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"the run {twice[0]} is named twice", hint="a run counts once: leave the copy out")
    total = views[0].footprint
    for view in views[1:]:
        total += view.footprint
    return total
