"""The schedulers' carbon forecast in a training scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from joulery.app.simulation import Overrides
from joulery.app.wiring.hourly_intensity import forecast_hours
from joulery.config.carbon import CarbonFile, carbon_from_flags
from joulery.config.parsing.quantity import RATIO, flag_quantity
from joulery.config.scenarios.training_study import CarbonForecastConfig, TrainingScenario
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import ConfigError
from joulery.sim.core.hourly_intensity import Intensity, day_ahead, forecast, typical
from joulery.sim.core.streams import Streams

Belief = Callable[[int], Intensity | None]
"""By seed; None for the truth."""


def believed(scenario: TrainingScenario, overrides: Overrides, grids: Mapping[str, CarbonSeries]) -> dict[str, Belief]:
    """The forecast in each region.

    Raises:
        ConfigError: A region has no forecast and should have one, or the flag is invalid.
        DataError: A forecast does not cover the hours of its region.
    """
    how, file = _wanted(scenario, overrides)
    truths = {region: Intensity.of(series) for region, series in grids.items()}
    if how.kind == "oracle":
        return dict.fromkeys(truths, lambda seed: None)
    if how.kind == "typical":
        return {region: partial(_always, typical(truth)) for region, truth in truths.items()}
    if how.kind == "error":
        return {region: partial(_synthetic, truth, how.error_ratio) for region, truth in truths.items()}
    by_name = {grid.name: grid.carbon for grid in scenario.regions}
    beliefs: dict[str, Belief] = {}
    for region, truth in truths.items():
        config = file if file is not None else by_name.get(region)
        if not isinstance(config, CarbonFile):
            hint = "give its file: --carbon-forecast forecast.csv"
            raise ConfigError(f"there is no recorded forecast for {region}", pointer="carbon_forecast.kind", hint=hint)
        hours = forecast_hours(config, grids[region], scenario.month)
        beliefs[region] = partial(_always, forecast(hours, truth))
    return beliefs


def _wanted(scenario: TrainingScenario, overrides: Overrides) -> tuple[CarbonForecastConfig, CarbonFile | None]:
    """The scenario's forecast, or that of ``--carbon-forecast``: a kind, an error, or a file."""
    text = overrides.inputs.get("carbon_forecast")
    if text is None:
        return scenario.carbon_forecast, None
    if text in ("oracle", "typical", "recorded"):
        return CarbonForecastConfig.model_validate({"kind": text}), None
    path = overrides.path("carbon_forecast")
    if path is not None and path.exists():
        config = carbon_from_flags(file=str(path))
        assert isinstance(config, CarbonFile)
        return CarbonForecastConfig.model_validate({"kind": "recorded"}), config.model_copy(update={"forecast": path})
    try:
        error_ratio = flag_quantity(text, RATIO, "--carbon-forecast")
    except ConfigError as error:
        raise ConfigError(
            "is neither a file nor a kind of forecast",
            pointer="--carbon-forecast",
            got=text,
            expected='oracle, typical, recorded, an error such as "27 %", or a CSV file of the forecast',
        ) from error
    return CarbonForecastConfig.model_construct(kind="error", error_ratio=error_ratio), None


def _always(belief: Intensity, _seed: int) -> Intensity:
    return belief


def _synthetic(truth: Intensity, error_ratio: float, seed: int) -> Intensity:
    return day_ahead(truth, error_ratio, Streams(seed)("forecast"))
