"""The node exporter: samples the meters of this node and publishes metrics. It reads no site file, to save memory.

``joulery export`` checks its flags, then replaces itself with a process that receives :class:`ExportConfig`.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from urllib.parse import SplitResult

from joulery.adapters.engines.counters.dialects import engine_counters
from joulery.adapters.engines.counters.scrape import metrics_address, scrape
from joulery.adapters.otlp import collector_address, push
from joulery.adapters.privileges import become
from joulery.adapters.processes import ProcessTable, listener
from joulery.app.intensity import intensity_of_now
from joulery.app.wiring.meters import open_meters, parse_meter
from joulery.app.wiring.share import open_busy
from joulery.domain.energy.workload import EngineCounters
from joulery.domain.errors import CapabilityError, ConfigError, DataError, JouleryError
from joulery.gateway.exporter.collector import ExporterMetrics
from joulery.gateway.exporter.http import MetricsServer
from joulery.gateway.exporter.otlp import otlp_body
from joulery.runtime.exporting.channels import NodeChannels
from joulery.runtime.exporting.engines import EngineSpec, EngineWatch
from joulery.runtime.exporting.intensity_feed import IntensityFeed
from joulery.runtime.exporting.node import NodeExporter, NodeReaders
from joulery.runtime.schedule.polling import stopped_by_signals

LOOPBACK = "127.0.0.1"
READ_EVERY_S = 1.0
"""Time between two readings of meters that show power instead of energy."""
MAX_CPU_RATIO = 0.01
"""Share of one core that sampling may take: a node with more processes is sampled less often."""
LATE_RATIO = 3.0
"""Sampling intervals without a sample after which the exporter is not healthy."""
LONGEST_S = 60.0
_GPUS = re.compile(r"(.+)@(gpu:\d+(?:,gpu:\d+)*)")
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
_LOCK = "\0joulery-export"
"""Name of an abstract socket: the kernel removes it with its process, however that ends."""


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """Settings of an exporter.

    Attributes:
        host, port: Where it listens.
        once: Whether to print one scrape and end.
        sample_s: Sampling interval.
        engine_s: Time between two readings of the engines' counters.
        meters: Meters as on the command line; the preferred ones of this machine when empty.
        engines: ``URL`` or ``URL@gpu:0,gpu:1``.
        carbon: Flags that name the source of carbon intensity.
        pue: Facility energy per IT energy.
        otlp: Address that metrics are pushed to; empty to push none.
        otlp_s: Time between two pushes.
        user: User to switch to once meters are open; empty to keep the present one.
        beside: Whether to run although another exporter runs on this node.
        as_json: Whether to write the address as JSON once the exporter listens.
    """

    host: str = LOOPBACK
    port: int = 9107
    once: bool = False
    sample_s: float = 5.0
    engine_s: float = 15.0
    meters: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    carbon: dict[str, str] = field(default_factory=dict)
    pue: float = 1.0
    otlp: str = ""
    otlp_s: float = 60.0
    user: str = ""
    beside: bool = False
    as_json: bool = False

    def to_json(self) -> str:
        """The configuration as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExportConfig:
        """The reverse of :meth:`to_json`.

        Raises:
            ConfigError: The text was not written by :meth:`to_json`.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "meters": tuple(fields["meters"]), "engines": tuple(fields["engines"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"no exporter configuration: {error}", got=text[:200], pointer="--configured") from error


class EngineAt:
    """Reads the counters of an engine from its metrics page."""

    def __init__(self, address: SplitResult) -> None:
        self._address = address

    def counters(self) -> EngineCounters:
        """Counters of the engine; ``trtllm-serve`` serves JSON on ``/metrics`` and its counters elsewhere."""
        page = scrape(self._address)
        if page.lstrip()[:1] in ("[", "{") and self._address.path == "/metrics":
            self._address = self._address._replace(path="/prometheus/metrics")
            page = scrape(self._address)
        try:
            return engine_counters(page)
        except DataError as error:
            raise DataError(f"{self._address.geturl()}: {error}", hint=error.hint) from error

    def process(self) -> int:
        """Process id that listens on the engine's port; 0 where it is on another host or hidden."""
        host = self._address.hostname or ""
        if host not in _LOCAL and host != platform.node():
            return 0
        return listener(self._address.port or (443 if self._address.scheme == "https" else 80))


def engine_spec(text: str) -> EngineSpec:
    """Parse an engine as named on the command line.

    Raises:
        ConfigError: The text is not an address, or does not name GPUs after ``@``.
    """
    address, gpus = text, ()
    if match := _GPUS.fullmatch(text.strip()):
        address, gpus = match[1], tuple(dict.fromkeys(match[2].split(",")))
    parts = metrics_address(address.strip(), "--engine")
    port = f":{parts.port}" if parts.port else ""
    return EngineSpec(f"{parts.hostname}{port}", EngineAt(parts), gpus)


def engine_specs(texts: tuple[str, ...]) -> tuple[EngineSpec, ...]:
    """Parse all engines of the command line.

    Raises:
        ConfigError: An engine is wrong, is named twice, or two own the same GPU.
    """
    specs = tuple(engine_spec(text) for text in texts)
    for number, spec in enumerate(specs):
        for other in specs[:number]:
            if spec.name == other.name:
                raise ConfigError("this engine is named twice", pointer="--engine", got=spec.name)
            if shared := set(spec.gpus) & set(other.gpus):
                raise ConfigError(
                    f"{', '.join(sorted(shared))} cannot be the own GPU of both {other.name} and {spec.name}",
                    pointer="--engine",
                    hint="leave the GPUs out: the driver lists the processes that use them",
                )
    return specs


def check(config: ExportConfig) -> None:
    """Check the configuration before anything is opened.

    Raises:
        ConfigError: A setting is wrong.
    """
    for text in config.meters:
        parse_meter(text)
    engine_specs(config.engines)
    if config.otlp:
        collector_address(config.otlp)
    if not 0 <= config.port <= 65535:
        raise ConfigError("not a port", pointer="--port", got=str(config.port), expected="0 to 65535")
    if not 1.0 <= config.pue < float("inf"):
        raise ConfigError("facility energy per IT energy is at least 1", pointer="--pue", got=f"{config.pue:g}")
    for name, seconds, least in (
        ("--period", config.sample_s, 0.1),
        ("--engine-interval", config.engine_s, 0.1),
        ("--otlp-interval", config.otlp_s, 1.0),
    ):
        if not least <= seconds <= 3600:
            raise ConfigError("not an interval", pointer=name, got=f"{seconds:g} s", expected=f"{least:g} s to 1 h")


def run_exporter(config: ExportConfig, say: Callable[[str], None], write: Callable[[bytes], None]) -> None:
    """Export until a signal ends it, or print one scrape.

    Args:
        config: Settings of the exporter.
        say: Receives messages for the user, one sentence each.
        write: Receives the scrape of ``once``, or the address with ``as_json``.

    Raises:
        ConfigError: The port is taken, or another exporter runs here.
        CapabilityError: No meter answers.
    """
    with ExitStack() as stack:
        if not config.once and not config.beside:
            stack.enter_context(_only_one())
        address = collector_address(config.otlp) if config.otlp else None
        engines = tuple(EngineWatch(spec) for spec in engine_specs(config.engines))
        readers = _open(config, stack, say)
        if config.user:
            become(config.user)
        start_ns = time.time_ns()
        node = NodeExporter(readers, engines, time.monotonic, time.time, _once_each(say))
        metrics = ExporterMetrics(node)
        node.interval_s = config.sample_s
        stop = stack.enter_context(stopped_by_signals())
        if config.once:
            _wait(node, config.sample_s, stop)
            node.sample(ask=True)
            write(metrics.render()[0])
            return
        server = MetricsServer(config.host, config.port, metrics.render, lambda: _late(node))
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        stack.callback(server.shutdown)
        if readers.intensity is not None:
            readers.intensity.start()
        host, port = server.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        url = f"http://{shown}:{port}/metrics"
        if config.as_json:
            write(json.dumps({"url": url, "pid": os.getpid()}).encode() + b"\n")
        else:
            say(f"listening on {url}")
        gc.freeze()
        pushed = None if address is None else _Pusher(node, address, start_ns, say)
        _loop(node, config, stop, pushed)


def _open(config: ExportConfig, stack: ExitStack, say: Callable[[str], None]) -> NodeReaders:
    """Open meters, process tables and the source of carbon intensity."""
    opened = open_meters([parse_meter(text) for text in config.meters] or None)
    for meter in opened.meters:
        stack.callback(meter.close)
    if not opened.meters:
        raise CapabilityError(
            "no meter answers here", hint="joulery doctor lists what can be read here, and how to grant the rest"
        )
    for refused in opened.refused:
        say(f"{refused}; {refused.hint}" if refused.hint else str(refused))
    busy = open_busy()
    stack.callback(busy.close)
    feed = None
    if config.carbon:
        feed = IntensityFeed(intensity_of_now(config.carbon), time.time)
        feed.first()
        stack.callback(feed.close)
    return NodeReaders(NodeChannels(opened.meters), busy, ProcessTable(), feed, config.pue)


def _loop(node: NodeExporter, config: ExportConfig, stop: threading.Event, pushed: _Pusher | None) -> None:
    engines_at_s = time.monotonic() + config.engine_s
    push_at_s = time.monotonic() + config.otlp_s
    sample_s = config.sample_s
    while not _wait(node, sample_s, stop):
        now_s, before_s = time.monotonic(), time.process_time()
        ask = now_s >= engines_at_s
        node.sample(ask=ask)
        sample_s = node.interval_s = next_interval_s(config.sample_s, time.process_time() - before_s)
        if ask:
            engines_at_s = now_s + config.engine_s
        if pushed is not None and now_s >= push_at_s:
            pushed.push()
            push_at_s = now_s + config.otlp_s


def next_interval_s(asked_s: float, spent_s: float) -> float:
    """Time to the next sample: the configured one, or longer where the last sample took too much of a core.

    Args:
        asked_s: Sampling interval.
        spent_s: CPU seconds that the last sample took.
    """
    return min(max(asked_s, spent_s / MAX_CPU_RATIO), LONGEST_S)


def _wait(node: NodeExporter, sample_s: float, stop: threading.Event) -> bool:
    """Wait for the next sample, reading meters of power meanwhile; True where a signal came."""
    end_s = time.monotonic() + sample_s
    often = node.readers.channels.between_samples
    while (left_s := end_s - time.monotonic()) > 0:
        if stop.wait(min(left_s, READ_EVERY_S) if often else left_s):
            return True
        if often and end_s - time.monotonic() > READ_EVERY_S / 2:
            node.advance()
    return stop.is_set()


class _Pusher:
    """Pushes metrics to a collector; the next push makes up for a failed one, because sums are cumulative."""

    def __init__(self, node: NodeExporter, address: SplitResult, start_ns: int, say: Callable[[str], None]) -> None:
        self._node, self._address, self._start_ns, self._say = node, address, start_ns, say
        self._failed = False

    def push(self) -> None:
        body = otlp_body(self._node, platform.node(), self._start_ns, time.time_ns())
        try:
            push(self._address, body)
        except JouleryError as error:
            if not self._failed:
                self._say(f"metrics are not pushed: {error}")
            self._failed = True
            return
        if self._failed:
            self._failed = False
            self._say("metrics are pushed again")


def _late(node: NodeExporter) -> str:
    """Message where no sample was taken for long; empty while all is well."""
    age_s = node.now_s() - node.sampled_at_s
    return f"no sample for {age_s:.0f} s" if age_s > LATE_RATIO * node.interval_s + READ_EVERY_S + 2.0 else ""


@contextmanager
def _only_one() -> Iterator[None]:
    """Ensure that one exporter runs on the node: sums over targets would count the energy of two twice."""
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(_LOCK)
        except OSError as error:
            raise ConfigError(
                "another joulery export runs on this node: sums over both would count its energy twice",
                hint="scrape that one, or end it first; --beside runs a second one, --once prints one scrape",
            ) from error
        yield


def _once_each(say: Callable[[str], None]) -> Callable[[str], None]:
    """Suppress repetitions of a message within an hour: an intermittent fault must not fill a disk."""
    latest: dict[str, float] = {}

    def say_once(text: str) -> None:
        now_s = time.monotonic()
        if now_s - latest.get(text, -1e9) < 3600:
            return
        if len(latest) > 1000:
            latest.clear()
        latest[text] = now_s
        say(text)

    return say_once


def main_arguments(config: ExportConfig) -> list[str]:
    """The command line of the exporter's own process."""
    return [sys.executable, "-P", "-m", "joulery", "export", "--configured", config.to_json()]


def replace_process(config: ExportConfig) -> None:
    """Replace this process with the exporter: parsing flags takes more memory than exporting."""
    os.execv(sys.executable, main_arguments(config))
