"""Open meters by kind. Imports nothing heavy: the sampler process starts with it."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulery.adapters.presence import SYS, require_amd, require_ina3221, require_nvidia
from joulery.domain.energy.channel import HOST, Channel, MeterSpec, ReadingKind
from joulery.domain.errors import CapabilityError, ConfigError, JouleryError
from joulery.runtime.measuring.share import OpenMeters

if TYPE_CHECKING:
    from joulery.domain.ports import Meter

KINDS = ("rapl", "nvml", "amd", "jetson", "dcgm", "ipmi", "redfish", "slurm", "cpu-model", "replay", "fake")
PREFERRED = ("rapl", "nvml", "amd", "jetson", "cpu-model")
"""Meters to try in this order unless meters are named: each device is read by the first meter that can."""
DCGM = "http://localhost:9400/metrics"
"""Default address of NVIDIA's DCGM exporter."""
_IF_HERE: Mapping[str, Mapping[str, Any]] = {kind: {"if_here": True} for kind in ("nvml", "amd", "jetson")}
"""Options of meters that were not named: check for their driver before importing their module."""
_OPTIONAL = {"jetson": "rails", "slurm": "node"}
"""Name of the option after the colon of a meter's name, by meter."""


def parse_meter(text: str) -> MeterSpec:
    """Parse a meter as named on the command line.

    ``rapl``, ``nvml``, ``amd``, ``jetson``, ``jetson:RAIL+RAIL``, ``dcgm:URL``, ``ipmi``, ``redfish:URL``, ``slurm``,
    ``slurm:NODE``, ``cpu-model``, ``cpu-model:IDLE,MAX`` (watts of the machine), ``replay:FILE``, ``fake:WATTS``,
    ``fake:FILE`` (a script), or the name of a plug-in.

    Raises:
        ConfigError: The text is none of these.
    """
    kind, colon, rest = text.partition(":")
    if kind == "cpu-model" and colon:
        idle, _, most = rest.partition(",")
        return MeterSpec(kind, {"idle_w": _watts(text, idle), "max_w": _watts(text, most)})
    if kind == "dcgm":
        return MeterSpec(kind, {"address": rest or DCGM})
    if kind == "redfish":
        if not rest:
            raise ConfigError("no BMC is named", pointer="--meter", got=text, expected="redfish:https://HOST")
        return MeterSpec(kind, {"address": rest})
    if kind in _OPTIONAL and colon:
        return MeterSpec(kind, {_OPTIONAL[kind]: rest})
    if kind == "replay":
        return MeterSpec(kind, {"file": str(Path(rest).absolute())})
    if kind == "fake":
        if rest.endswith(".json"):
            return MeterSpec(kind, {"channels": _script(Path(rest))})
        return MeterSpec(kind, {"channels": [{"watts": [[0, _watts(text, rest or "50")]]}]})
    if colon:
        raise ConfigError("this meter takes no options", pointer="--meter", got=text)
    if kind not in KINDS and kind not in _plug_ins():
        raise ConfigError("no such meter", pointer="--meter", got=text, expected=", ".join((*KINDS, *_plug_ins())))
    return MeterSpec(kind)


def open_meters(specs: Sequence[MeterSpec] | None) -> OpenMeters:
    """Open the meters named, or the preferred ones that this machine has.

    Args:
        specs: Meters to open, all of which must answer; None for those of :data:`PREFERRED` that do.

    Raises:
        JouleryError: A meter that was named cannot be opened, or two that were named read the same device.
    """
    meters: list[Meter] = []
    refused: list[JouleryError] = []
    absent: list[JouleryError] = []
    taken: list[Channel] = []
    for spec in specs if specs is not None else [MeterSpec(kind, _IF_HERE.get(kind, {})) for kind in PREFERRED]:
        try:
            meter = open_meter(spec)
        except CapabilityError as error:
            if specs is not None:
                _close(meters)
                raise
            (refused if error.grant else absent).append(error)
            continue
        except JouleryError:
            _close(meters)
            raise
        twice = overlap(taken, meter.channels)
        if twice:
            meter.close()
            if specs is not None:
                _close(meters)
                raise ConfigError("two meters would count the same device", got=twice, pointer="--meter")
            continue
        meters.append(meter)
        taken += meter.channels
    return OpenMeters(tuple(meters), tuple(refused), tuple(absent))


def overlap(taken: Sequence[Channel], added: Sequence[Channel]) -> str:
    """Device that meters of both groups would count twice, as text; empty for none.

    A socket and a board are devices of their own. ``machine`` contains all sockets, and as the component ``host``
    (a BMC, a module's input) everything.
    """
    for one in taken:
        for other in added:
            pair = {one.device, other.device}
            machine = "machine" in pair
            whole = any(item.device == "machine" and item.component == HOST for item in (one, other))
            if len(pair) == 1 or whole or (machine and any(device.startswith("cpu:") for device in pair)):
                return f"{one.meter} reads {one.device} {one.component}, {other.meter} {other.device} {other.component}"
    return ""


def open_meter(spec: MeterSpec) -> Meter:
    """Open one meter; its module is imported now.

    Raises:
        JouleryError: As raised by the meter's opener.
    """
    options = dict(spec.options)
    opener = _OPENERS.get(spec.kind)
    if opener is not None:
        return opener(options)
    meter: Meter = _plug_ins()[spec.kind].load()(**options)
    return meter


def _rapl(options: Mapping[str, Any]) -> Meter:
    from joulery.adapters.meters.rapl import POWERCAP, SOCKET, open_rapl

    return open_rapl(Path(options.get("root", POWERCAP)), Path(options.get("helper", SOCKET)))


def _nvml(options: Mapping[str, Any]) -> Meter:
    if "if_here" in options:
        require_nvidia()
    from joulery.adapters.meters.nvml import open_nvml

    return open_nvml(importlib.import_module(options["module"]) if "module" in options else None)


def _amd(options: Mapping[str, Any]) -> Meter:
    if "if_here" in options:
        require_amd()
    from joulery.adapters.meters.amd import open_amd

    return open_amd(importlib.import_module(options["module"]) if "module" in options else None)


def _jetson(options: Mapping[str, Any]) -> Meter:
    sys = Path(options.get("sys", SYS))
    if "if_here" in options:
        require_ina3221(sys)
    from joulery.adapters.meters.jetson import open_jetson

    return open_jetson(options.get("rails", ""), sys)


def _dcgm(options: Mapping[str, Any]) -> Meter:
    from joulery.adapters.meters.dcgm import open_dcgm

    return open_dcgm(options.get("address", DCGM))


def _ipmi(options: Mapping[str, Any]) -> Meter:
    from joulery.adapters.meters.host.ipmi import open_ipmi

    return open_ipmi()


def _redfish(options: Mapping[str, Any]) -> Meter:
    from joulery.adapters.meters.host.redfish import open_redfish

    return open_redfish(options["address"])


def _slurm(options: Mapping[str, Any]) -> Meter:
    from joulery.adapters.meters.host.slurm_energy import open_slurm_energy

    conf = options.get("conf")
    return open_slurm_energy(options.get("node", ""), conf=None if conf is None else Path(conf))


def _cpu_model(options: Mapping[str, Any]) -> Meter:
    from joulery.adapters.meters.cpu_model import open_cpu_model

    return open_cpu_model(**options)


def _replay(options: Mapping[str, Any]) -> Meter:
    from joulery.adapters.meters.replay import open_replay

    return open_replay(Path(options["file"]))


def _scripted(channels: Sequence[Mapping[str, Any]]) -> Meter:
    from joulery.adapters.meters.fake import FakeMeter, Script

    scripts = []
    for channel in channels:
        try:
            fields = dict(channel)
            fields["watts"] = tuple((float(at_s), float(watts)) for at_s, watts in fields["watts"])
            fields["silent_s"] = tuple((float(a), float(b)) for a, b in fields.get("silent_s", ()))
            fields["kind"] = ReadingKind(fields.get("kind", "counter"))
            scripts.append(Script(**fields))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a channel of a fake: {error}", got=json.dumps(dict(channel))) from error
    return FakeMeter(scripts)


def _script(file: Path) -> list[dict[str, Any]]:
    try:
        channels = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(file)) from error
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", file=str(file)) from error
    if not isinstance(channels, list) or not all(isinstance(channel, dict) for channel in channels):
        raise ConfigError("a fake's script is a list of channels", file=str(file), expected='[{"watts": [[0, 50]]}]')
    _scripted(channels).close()
    return channels


def _watts(text: str, number: str) -> float:
    try:
        watts = float(number)
    except ValueError:
        watts = math.nan
    if not 0 <= watts < math.inf:
        raise ConfigError(
            "not a number of watts", pointer="--meter", got=text, expected="cpu-model:IDLE,MAX or fake:WATTS"
        )
    return watts


def _close(meters: Sequence[Meter]) -> None:
    for meter in meters:
        meter.close()


def _plug_ins() -> dict[str, Any]:
    """Meters that other packages offer under the entry point ``joulery.meters``, by name."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group="joulery.meters")}


_OPENERS: Mapping[str, Callable[[Mapping[str, Any]], Meter]] = {
    "rapl": _rapl,
    "nvml": _nvml,
    "amd": _amd,
    "jetson": _jetson,
    "dcgm": _dcgm,
    "ipmi": _ipmi,
    "redfish": _redfish,
    "slurm": _slurm,
    "cpu-model": _cpu_model,
    "replay": _replay,
    "fake": lambda options: _scripted(options["channels"]),
}
