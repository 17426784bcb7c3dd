"""A management controller: its Redfish resources over HTTP, and what ``ipmitool`` prints of it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

CHASSIS = "/redfish/v1/Chassis"


def dcmi(watts: int = 220, state: str = "activated") -> str:
    """What ``ipmitool dcmi power reading`` (1.8.19) prints."""
    return f"""
    Instantaneous power reading:                   {watts} Watts
    Minimum during sampling period:                 18 Watts
    Maximum during sampling period:                436 Watts
    Average power reading over sample period:      222 Watts
    IPMI timestamp:                           Tue Oct  6 07:43:20 2026
    Sampling period:                          00000001 Seconds.
    Power reading state is:                   {state}


"""


def link(path: str) -> dict[str, str]:
    """A reference to a resource."""
    return {"@odata.id": path}


def older(watts: float | None = 344, *, more: tuple[float, ...] = ()) -> dict[str, Any]:
    """A server that knows ``Power`` alone (DSP2046, Power 1.x)."""
    controls = [
        {"MemberId": str(number), "Name": f"Power Control {number}", "PowerConsumedWatts": value}
        for number, value in enumerate((watts, *more))
    ]
    return {
        CHASSIS: {"Members": [link(f"{CHASSIS}/1U")], "Members@odata.count": 1},
        f"{CHASSIS}/1U": {"Id": "1U", "ChassisType": "RackMount", "Power": link(f"{CHASSIS}/1U/Power")},
        f"{CHASSIS}/1U/Power": {"Id": "Power", "PowerControl": controls},
    }


def newer(joules: float | None = 5_000_000, watts: float | None = 1349.26) -> dict[str, Any]:
    """A server with ``EnvironmentMetrics``, and a board of GPUs that is a chassis in its chassis."""
    metrics: dict[str, Any] = {"Id": "EnvironmentMetrics", "EnergykWh": {"Reading": 12.5}}
    if watts is not None:
        metrics["PowerWatts"] = {"DataSourceUri": f"{CHASSIS}/Self/Sensors/power", "Reading": watts}
    if joules is not None:
        metrics["EnergyJoules"] = {"Reading": joules}
    return {
        CHASSIS: {"Members": [link(f"{CHASSIS}/Self"), link(f"{CHASSIS}/HGX")]},
        f"{CHASSIS}/Self": {"EnvironmentMetrics": link(f"{CHASSIS}/Self/EnvironmentMetrics"), "Links": {}},
        f"{CHASSIS}/Self/EnvironmentMetrics": metrics,
        f"{CHASSIS}/HGX": {
            "EnvironmentMetrics": link(f"{CHASSIS}/HGX/EnvironmentMetrics"),
            "Links": {"ContainedBy": link(f"{CHASSIS}/Self")},
        },
        f"{CHASSIS}/HGX/EnvironmentMetrics": {"PowerWatts": {"Reading": 900.0}},
    }


@contextmanager
def serving(resources: dict[str, Any], user: str = "", password: str = "") -> Iterator[str]:
    """The resources over HTTP on loopback; yields the address. With a user, others get 401."""
    wanted = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = resources.get(self.path)
            code = 404 if found is None else 200
            if user and self.headers.get("Authorization") != wanted:
                code, found = 401, {"error": {"code": "Base.1.0.GeneralError"}}
            body = found if isinstance(found, bytes) else json.dumps(found or {}).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
