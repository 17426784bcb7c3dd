"""Meter of Jetson modules, through the INA3221 power monitors in the kernel's sysfs.

The meter reads the rails of ``/sys/class/hwmon`` (JetPack 5 and later: ``inN_input`` millivolts times ``currN_input``
milliamperes) or of the older driver ``ina3221x`` (``in_powerN_input``, milliwatts). Rails overlap: the module's input
(``VDD_IN``, ``POM_5V_IN``) contains the others, so only the input is read. For a module without one (AGX Orin, AGX
Xavier), the meter adds up the rails that the user names: joulery does not guess which of them overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from joulery.adapters.meters.host.polled import DIVIDED
from joulery.adapters.presence import SYS
from joulery.domain.energy.channel import HOST, Channel, ReadingKind
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.quality import Quality

TOTALS = ("VDD_IN", "POM_5V_IN")
"""Labels of the rail that feeds the whole module."""
_UPDATE_S = 0.1


@dataclass(frozen=True, slots=True)
class Rail:
    """A channel of a power monitor: its label, and its file of milliwatts or those of millivolts and milliamperes."""

    label: str
    files: tuple[Path, ...]

    def read_w(self) -> float:
        """Read the power of the rail, watts.

        Raises:
            OSError, ValueError: A file cannot be read, or contains no number or a negative one.
        """
        values = [int(file.read_text()) for file in self.files]
        if any(value < 0 for value in values):
            raise ValueError(f"{self.label} reads {values}")
        return values[0] / 1e3 if len(values) == 1 else values[0] * values[1] / 1e6


class JetsonMeter:
    """Meter of the power of a module, or of the rails that were named."""

    def __init__(self, rails: tuple[Rail, ...], channel: Channel) -> None:
        self._rails = rails
        self._channel = channel
        self._notes = [DIVIDED] if channel.component == HOST else []
        self._failed = False
        self._open = True

    @property
    def channels(self) -> tuple[Channel, ...]:
        """One channel, the sum of the rails."""
        return (self._channel,)

    def read(self) -> tuple[float, ...]:
        """Watts; NaN where one of the rails cannot be read."""
        if not self._open:
            return (math.nan,)
        try:
            watts = sum(rail.read_w() for rail in self._rails)
        except (OSError, ValueError) as error:
            if not self._failed:
                self._notes.append(f"the power monitor cannot be read any more: {error}")
            self._failed = True
            return (math.nan,)
        if self._failed:
            self._failed = False
            self._notes.append("the power monitor can be read again")
        return (watts,)

    def notes(self) -> tuple[str, ...]:
        """New notes that the monitor cannot be read any more or can be read again."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """Stop reading. Safe to call twice."""
        self._open = False


def open_jetson(rails: str = "", sys: Path = SYS) -> JetsonMeter:
    """Open a meter of the power of this module.

    Args:
        rails: Labels joined by ``+``; the module's input when empty.
        sys: Mount point of the kernel's ``/sys``.

    Raises:
        CapabilityError: There is no power monitor, it may not be read, or no rail feeds the whole module.
        ConfigError: A named rail does not exist, or is named twice.
    """
    found = {rail.label: rail for rail in (*_hwmon(sys), *_older(sys))}
    if not found:
        raise CapabilityError("no Jetson power monitor (INA3221) here", resource=str(sys / "class/hwmon"))
    wanted = rails.split("+") if rails else [next((label for label in TOTALS if label in found), "")]
    if wanted == [""]:
        raise CapabilityError(
            f"no rail feeds the whole module: {', '.join(sorted(found))}",
            resource=str(sys),
            hint=f"name those to add up: --meter jetson:{'+'.join(sorted(found)[:2])}",
        )
    unknown = [label for label in wanted if label not in found]
    if unknown or len(set(wanted)) < len(wanted):
        raise ConfigError(
            f"no such rail: {unknown[0]}" if unknown else "a rail is named twice",
            pointer="--meter",
            got=f"jetson:{rails}",
            expected=" + ".join(sorted(found)),
        )
    chosen = tuple(found[label] for label in wanted)
    try:
        for rail in chosen:
            rail.read_w()
    except PermissionError as error:
        raise CapabilityError(
            f"the power monitor may not be read: {error.filename}", resource=str(error.filename), grant=_grant(chosen)
        ) from error
    except (OSError, ValueError) as error:
        raise CapabilityError(f"the power monitor cannot be read: {error}", resource=str(sys)) from error
    component = HOST if wanted[0] in TOTALS else "rails"
    channel = Channel("machine", component, ReadingKind.POWER, "jetson", Quality.MEASURED, update_s=_UPDATE_S)
    return JetsonMeter(chosen, channel)


def _hwmon(sys: Path) -> list[Rail]:
    folders = (path for path in sorted((sys / "class/hwmon").glob("hwmon*")) if _text(path / "name") == "ina3221")
    return _labelled(
        (_text(folder / f"in{n}_label"), (folder / f"in{n}_input", folder / f"curr{n}_input"))
        for folder in folders
        for n in (1, 2, 3)
    )


def _older(sys: Path) -> list[Rail]:
    return _labelled(
        (_text(folder / f"rail_name_{n}"), (folder / f"in_power{n}_input",))
        for folder in sorted((sys / "bus/i2c/drivers/ina3221x").glob("*/iio:device*"))
        for n in (0, 1, 2)
    )


def _labelled(rails: Iterable[tuple[str, tuple[Path, ...]]]) -> list[Rail]:
    """The rails that have a label, are connected and have all their files."""
    return [Rail(name, files) for name, files in rails if name and name != "NC" and all(f.exists() for f in files)]


def _grant(rails: tuple[Rail, ...]) -> str:
    return "sudo chmod a+r " + " ".join(str(file) for rail in rails for file in rail.files)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
