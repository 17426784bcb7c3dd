"""Program ``python -m joulery.app.intensity JSON``: prints the current carbon intensity as one JSON object.

The exporter runs it every few minutes: sources need an HTTP client and the parser of site files, which take more
memory than the exporter may use.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import CapabilityError, ConfigError, DataError, JouleryError
from joulery.domain.quality import Quality
from joulery.runtime.process import part_environment, process_command

LOOK_BACK_S, AHEAD_S = 3600.0, 900.0
TIMEOUT_S = 60.0
_KINDS: Mapping[str, type[JouleryError]] = {kind.kind: kind for kind in (CapabilityError, ConfigError, DataError)}


def intensity_of_now(flags: Mapping[str, str]) -> Callable[[float], CarbonSeries]:
    """Return a function that reads the source of ``flags`` in a process of its own: the series around a Unix time.

    The function raises JouleryError if the flags are wrong or the source does not answer.

    Args:
        flags: ``zone``, ``carbon`` and so on, as on the command line.
    """

    def ask(now_s: float) -> CarbonSeries:
        argument = json.dumps({"flags": dict(flags), "now_s": now_s})
        try:
            done = subprocess.run(
                process_command("joulery.app.intensity", argument),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                env=part_environment(),
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"the source did not answer: {error}") from error
        try:
            return _decoded(json.loads(done.stdout))
        except (ValueError, TypeError, KeyError) as error:
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
            raise DataError(f"the source did not answer: {reason[0]}") from error

    return ask


def main(argument: str) -> int:
    """Print the series, or the error, as JSON; return the exit code."""
    from joulery.app.measuring import open_carbon

    asked = json.loads(argument)
    now_s = float(asked["now_s"])
    try:
        source = open_carbon(asked["flags"])
        if source is None:
            raise ConfigError("no source of carbon intensity is named", expected="--zone or --carbon")
        try:
            series = source.history(now_s - LOOK_BACK_S, now_s + AHEAD_S)
        except DataError:
            series = source.history(now_s - LOOK_BACK_S, now_s + 1.0)
    except JouleryError as error:
        sys.stdout.write(json.dumps({"error": error.as_dict()}, default=str))
        return error.exit_code
    sys.stdout.write(json.dumps(_encoded(series)))
    return 0


def _encoded(series: CarbonSeries) -> dict[str, Any]:
    return {
        "zone": series.zone,
        "edges_s": series.edges_s.tolist(),
        "g_per_kwh": [None if math.isnan(value) else value for value in series.g_per_kwh.tolist()],
        "signal": series.signal.value,
        "scope": series.scope.value,
        "source": series.source,
        "estimated": series.estimated.tolist(),
        "quality": series.quality.value,
    }


def _decoded(answer: Mapping[str, Any]) -> CarbonSeries:
    """Decode the series of an answer.

    Raises:
        JouleryError: The answer is an error.
    """
    if error := answer.get("error"):
        kind = _KINDS.get(error["kind"], DataError)
        fields = {key: error[key] for key in ("pointer", "got", "expected", "file") if key in error}
        if kind is ConfigError:
            raise ConfigError(error["message"], hint=error["hint"], **fields)
        raise kind(error["message"], hint=error["hint"])
    return CarbonSeries(
        answer["zone"],
        answer["edges_s"],
        [math.nan if value is None else value for value in answer["g_per_kwh"]],
        signal=Signal(answer["signal"]),
        scope=Scope(answer["scope"]),
        source=answer["source"],
        estimated=answer["estimated"],
        quality=Quality(answer["quality"]),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
