"""The energy books of a node as OpenTelemetry metrics: the body of one OTLP/HTTP push, in JSON.

Names follow OpenTelemetry's semantic conventions for hardware (``hw.energy`` in joules, ``hw.power`` in watts, with
``hw.id`` and ``hw.type``). Conventions for generative AI do not define energy yet: joules of models are
``joulery.model.energy``, with ``gen_ai.request.model`` and ``gen_ai.token.type``. Encoding: opentelemetry-proto 1,
``ExportMetricsServiceRequest``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from joulery import __version__
from joulery.runtime.exporting.node import NodeExporter

_CUMULATIVE = 2
_TYPES = {"gpu": "gpu", "cpu": "cpu", "machine": "host"}


def otlp_body(node: NodeExporter, host: str, start_ns: int, now_ns: int) -> bytes:
    """Encode the body of one push.

    Args:
        node: The node exporter with the energy books.
        host: Name of this host.
        start_ns, now_ns: Start of the exporter and present time, Unix nanoseconds.
    """
    points: dict[str, list[dict[str, Any]]] = {}

    def add(name: str, value: float, attributes: Mapping[str, str]) -> None:
        if not math.isnan(value):
            points.setdefault(name, []).append(
                {
                    "attributes": [{"key": key, "value": {"stringValue": text}} for key, text in attributes.items()],
                    "startTimeUnixNano": str(start_ns),
                    "timeUnixNano": str(now_ns),
                    "asDouble": value,
                }
            )

    with node.lock:
        for one in node.readers.channels.channels:
            channel = one.channel
            hardware = {
                "hw.id": f"{channel.device}/{channel.component}",
                "hw.type": _TYPES.get(channel.device.partition(":")[0], "other"),
                "joulery.meter": channel.meter,
                "joulery.quality": channel.quality.value,
            }
            add("hw.energy", one.total_j, hardware)
            add("hw.power", one.power_w, hardware)
        for (workload, device, quality), total in node.book.workloads.items():
            who = {
                "joulery.workload.kind": workload.kind,
                "joulery.workload.name": workload.name,
                "hw.type": _TYPES.get(device.partition(":")[0], "other"),
                "joulery.quality": quality.value,
            }
            add("joulery.workload.energy", total.energy_j, who)
            add("joulery.workload.carbon", total.carbon_g if total.unknown_j < total.energy_j else math.nan, who)
        for engine in node.engines:
            for model, totals in engine.book.models.items():
                who = {"gen_ai.request.model": model, "server.address": engine.name, "joulery.engine": engine.kind}
                add("joulery.model.energy", totals.energy_j, who)
                known = totals.unknown_j < totals.energy_j
                add("joulery.model.carbon", totals.carbon_g if known else math.nan, who)
                add("joulery.model.tokens", totals.prompt_tokens, {**who, "gen_ai.token.type": "input"})
                add("joulery.model.tokens", totals.output_tokens, {**who, "gen_ai.token.type": "output"})
    return json.dumps(_request(points, host)).encode()


_UNITS = {
    "hw.energy": "J",
    "hw.power": "W",
    "joulery.workload.energy": "J",
    "joulery.workload.carbon": "g",
    "joulery.model.energy": "J",
    "joulery.model.carbon": "g",
    "joulery.model.tokens": "{token}",
}


def _request(points: Mapping[str, list[dict[str, Any]]], host: str) -> dict[str, Any]:
    metrics = []
    for name, found in points.items():
        data: dict[str, Any] = {"dataPoints": found}
        if name == "hw.power":
            metrics.append({"name": name, "unit": _UNITS[name], "gauge": data})
        else:
            sums = {**data, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True}
            metrics.append({"name": name, "unit": _UNITS[name], "sum": sums})
    resource = {"service.name": "joulery-export", "service.version": __version__, "host.name": host}
    attributes = [{"key": key, "value": {"stringValue": text}} for key, text in resource.items()]
    scope = {"name": "joulery", "version": __version__}
    return {
        "resourceMetrics": [
            {"resource": {"attributes": attributes}, "scopeMetrics": [{"scope": scope, "metrics": metrics}]}
        ]
    }
