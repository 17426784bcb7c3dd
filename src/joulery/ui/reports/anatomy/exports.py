"""Export a tensor energy footprint to the formats of other tools: flame graphs, speedscope, Perfetto, CSV, Parquet."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import orjson

from joulery.accounting.operations.edd import powers_w
from joulery.accounting.steps import power_steps
from joulery.domain.energy.power import PowerTrace
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.trace.events import EventTrace

COLUMNS = (
    "op",
    "device",
    "phase",
    "energy_j",
    "carbon_g",
    "runtime_s",
    "uncovered_s",
    "count",
    "samples",
    "median_s",
    "share_power_w",
    "device_power_w",
)


def table(footprint: TensorFootprint) -> dict[str, list[Any]]:
    """The rows as columns, most energy first; unknown numbers are NaN."""
    order = np.argsort(-np.nan_to_num(footprint.energy_j), kind="stable")
    shared_w, device_w = (np.array(values) for values in powers_w(footprint))
    columns = {
        "op": np.array(footprint.op, object),
        "device": np.array(footprint.device, object),
        "phase": np.array(footprint.phase, object),
        "energy_j": footprint.energy_j,
        "carbon_g": footprint.carbon_g,
        "runtime_s": footprint.runtime_ns / 1e9,
        "uncovered_s": footprint.uncovered_ns / 1e9,
        "count": footprint.count,
        "samples": footprint.samples,
        "median_s": footprint.median_ns / 1e9,
        "share_power_w": shared_w,
        "device_power_w": device_w,
    }
    return {name: columns[name][order].tolist() for name in COLUMNS}


def as_csv(footprint: TensorFootprint) -> str:
    """The rows as CSV; an unknown number is an empty cell."""
    columns = table(footprint)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow("" if isinstance(cell, float) and math.isnan(cell) else cell for cell in row)
    return text.getvalue()


def as_parquet(footprint: TensorFootprint) -> bytes:
    """The rows as Parquet; an unknown number is null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    columns = {name: pa.array(values, from_pandas=True) for name, values in table(footprint).items()}
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()


def stacks(footprint: TensorFootprint) -> Iterator[tuple[tuple[str, ...], float]]:
    """(device, phase, components of the name) and joules of each row with energy."""
    rows = zip(footprint.op, footprint.device, footprint.phase, footprint.energy_j.tolist(), strict=True)
    for op, device, phase, joules in rows:
        if joules > 0:
            yield (device, phase or "other", *op.split("/")), joules


def as_folded(footprint: TensorFootprint) -> str:
    """Folded stacks weighted in joules, for ``flamegraph.pl`` and similar tools."""
    lines = sorted(
        f"{';'.join(part.replace(';', ':') for part in stack)} {joules:.9f}" for stack, joules in stacks(footprint)
    )
    return "".join(line + "\n" for line in lines)


def as_speedscope(footprint: TensorFootprint, name: str) -> bytes:
    """A speedscope file with one profile a device; weights are joules."""
    frames: dict[str, int] = {}
    profiles: dict[str, dict[str, Any]] = {}
    for (device, *stack), joules in stacks(footprint):
        profile = profiles.setdefault(
            device,
            {
                "type": "sampled",
                "name": f"{device} (joules)",
                "unit": "none",
                "startValue": 0,
                "endValue": 0.0,
                "samples": [],
                "weights": [],
            },
        )
        profile["samples"].append([frames.setdefault(frame, len(frames)) for frame in stack])
        profile["weights"].append(joules)
        profile["endValue"] += joules
    return orjson.dumps(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "exporter": "joulery",
            "name": name,
            "shared": {"frames": [{"name": frame} for frame in frames]},
            "profiles": list(profiles.values()),
        }
    )


def write_perfetto(file: IO[bytes], trace: EventTrace, power: Sequence[PowerTrace]) -> None:
    """Chrome trace JSON for ui.perfetto.dev: every event on its lane, and one counter track of watts a device."""
    devices = {name: number for number, name in enumerate(dict.fromkeys([*trace.devices, *_powered(power)]), start=1)}
    file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
    parts = (_names(devices), _events(trace, devices), _counters(power, devices))
    for number, event in enumerate(event for part in parts for event in part):
        file.write((b"" if number == 0 else b",\n") + event)
    file.write(b"\n]}\n")


def _powered(power: Sequence[PowerTrace]) -> list[str]:
    return [trace.channel.device for trace in power]


def _names(devices: dict[str, int]) -> Iterator[bytes]:
    for name, number in devices.items():
        yield orjson.dumps({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}})


def _events(trace: EventTrace, devices: dict[str, int]) -> Iterator[bytes]:
    names = [orjson.dumps(op.rpartition("/")[2]) for op in trace.ops]
    paths = [orjson.dumps(op) for op in trace.ops]
    phases = [orjson.dumps(phase or "other") for phase in trace.phases]
    processes = [devices[name] for name in trace.devices]
    columns = (trace.op, trace.phase, trace.device, trace.lane, trace.start_ns, trace.dur_ns)
    for op, phase, device, lane, start, length in zip(*(column.tolist() for column in columns), strict=True):
        yield (
            b'{"ph":"X","name":%b,"cat":%b,"pid":%d,"tid":%d,"ts":%b,"dur":%b,"args":{"op":%b}}'
            % (names[op], phases[phase], processes[device], lane + 1, _us(start), _us(length), paths[op])
        )


def _counters(power: Sequence[PowerTrace], devices: dict[str, int]) -> Iterator[bytes]:
    for trace in power:
        steps = power_steps(trace)
        watts: Iterable[float] = np.nan_to_num(steps.watts).tolist()
        name = orjson.dumps(f"{trace.channel.device} {trace.channel.component} W")
        for start, value in zip(steps.edges_ns[:-1].tolist(), watts, strict=True):
            yield b'{"ph":"C","name":%b,"pid":%d,"tid":0,"ts":%b,"args":{"W":%b}}' % (
                name,
                devices[trace.channel.device],
                _us(start),
                orjson.dumps(value),
            )


def _us(ns: int) -> bytes:
    """Nanoseconds as decimal microseconds, exactly."""
    sign = b"-" if ns < 0 else b""
    return b"%b%d.%03d" % (sign, abs(ns) // 1000, abs(ns) % 1000)
