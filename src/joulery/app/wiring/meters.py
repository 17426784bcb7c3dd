"""Open meters by kind. Imports nothing heavy: the sampler process starts with it."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulery.domain.energy.channel import MeterSpec, ReadingKind
from joulery.domain.errors import CapabilityError, ConfigError, JouleryError
from joulery.runtime.measuring.share import OpenMeters

if TYPE_CHECKING:
    from joulery.domain.ports import Meter

KINDS = ("rapl", "nvml", "dcgm", "cpu-model", "replay", "fake")
PREFERRED = ("rapl", "nvml", "cpu-model")
"""Tried in this order unless meters are named: each device is read by the first meter that can."""
DCGM = "http://localhost:9400/metrics"
"""Default address of NVIDIA's DCGM exporter."""


def parse_meter(text: str) -> MeterSpec:
    """A meter as it is named on the command line.

    ``rapl``, ``nvml``, ``dcgm:URL``, ``cpu-model``, ``cpu-model:IDLE,MAX`` (watts of the machine), ``replay:FILE``,
    ``fake:WATTS``, ``fake:FILE`` (a script), or the name of a plug-in.

    Raises:
        ConfigError: It is none of these.
    """
    kind, colon, rest = text.partition(":")
    if kind == "cpu-model" and colon:
        idle, _, most = rest.partition(",")
        return MeterSpec(kind, {"idle_w": _watts(text, idle), "max_w": _watts(text, most)})
    if kind == "dcgm":
        return MeterSpec(kind, {"address": rest or DCGM})
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
    taken: set[str] = set()
    for spec in specs if specs is not None else [MeterSpec(kind) for kind in PREFERRED]:
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
        devices = {channel.device for channel in meter.channels}
        twice = devices & taken or ({"machine"} & (devices | taken) and _cpus(devices) | _cpus(taken))
        if twice:
            meter.close()
            if specs is not None:
                _close(meters)
                raise ConfigError("two meters would count the same device", got=f"{spec.kind} reads {sorted(devices)}")
            continue
        meters.append(meter)
        taken |= devices
    return OpenMeters(tuple(meters), tuple(refused), tuple(absent))


def open_meter(spec: MeterSpec) -> Meter:
    """Open one meter; its module is imported now.

    Raises:
        JouleryError: As the meter's opener says.
    """
    options = dict(spec.options)
    if spec.kind == "rapl":
        from joulery.adapters.meters.rapl import POWERCAP, open_rapl

        return open_rapl(Path(options.get("root", POWERCAP)))
    if spec.kind == "nvml":
        from joulery.adapters.meters.nvml import open_nvml

        return open_nvml(importlib.import_module(options["module"]) if "module" in options else None)
    if spec.kind == "dcgm":
        from joulery.adapters.meters.dcgm import open_dcgm

        return open_dcgm(options.get("address", DCGM))
    if spec.kind == "cpu-model":
        from joulery.adapters.meters.cpu_model import open_cpu_model

        return open_cpu_model(**options)
    if spec.kind == "replay":
        from joulery.adapters.meters.replay import open_replay

        return open_replay(Path(options["file"]))
    if spec.kind == "fake":
        return _fake(options["channels"])
    meter: Meter = _plug_ins()[spec.kind].load()(**options)
    return meter


def _fake(channels: Sequence[Mapping[str, Any]]) -> Meter:
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
    _fake(channels).close()
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


def _cpus(devices: set[str]) -> set[str]:
    return {device for device in devices if device.startswith("cpu:")}


def _close(meters: Sequence[Meter]) -> None:
    for meter in meters:
        meter.close()


def _plug_ins() -> dict[str, Any]:
    """Meters that other packages offer under the entry point ``joulery.meters``, by name."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group="joulery.meters")}
