"""Settings of every test."""

import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.skips import allowed_as

# Threads of libraries wait without a core, here and in every program that a test starts: OpenBLAS's, as in
# joulery.ui.cli.numpy_threads, and PyTorch's. With more workers than cores they take much CPU time by waiting busily.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Wall time is no assertion: a loaded machine is slow, not wrong. New examples are drawn in every run, and found faults
# kept; in CI they are the same each time, so that a change is not judged by the luck of a draw.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("house"), derandomize=True, database=None)
settings.load_profile("same" if os.environ.get("JOULERY_SAME_EXAMPLES") else "house")

# A shell that runs `make test &` has it ignore Ctrl-C, and everything a test starts would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


IN_CI = bool(os.environ.get("CI"))
LOOK_CPU_S, REPEATS = 0.1, 4
"""The cases of a test may bring nothing new, together, for so many times so much of their CPU time; then each, like a
property's, is traced until it brings nothing new. Tracing doubles that time, and what goes on repeats itself."""
LOWER_PRIORITY = 5
_repeats: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    """A worker has one tracer, and one that computes a lower priority: programs that tests wait for may be late."""
    if worker := worker_of(config):
        from tests.scheduling import computes

        # pytest-cov starts a tracer before it knows that it is in a worker, and another one then; whenever the second
        # is paused, the first goes on.
        if (first := tracer_of(config)) is not None:
            first.pause()
        if computes(worker):
            os.nice(LOWER_PRIORITY)


def worker_of(config: pytest.Config) -> str:
    """The name of this worker; empty where there is one process."""
    return str(config.workerinput["workerid"]) if hasattr(config, "workerinput") else ""


def tracer_of(config: pytest.Config) -> Any:
    """What starts, pauses and ends the tracing of this process; None where nothing is traced."""
    return getattr(config.pluginmanager.getplugin("_cov"), "cov_controller", None)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """One worker traces what runs when modules are imported: every worker imports them all.

    What is imported and collected lives to the end: the garbage collector looks at it neither meanwhile nor later.
    """
    tracer = tracer_of(session.config) if worker_of(session.config) not in ("", "gw0") else None
    if tracer is not None:
        tracer.pause()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        if tracer is not None:
            tracer.resume()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several workers, tests that wait for programs run beside those that compute."""
    if worker_of(config):
        from tests.scheduling import spread

        items[:] = [items[place] for place in spread([item.nodeid for item in items])]


def branches(tracer: Any) -> int:
    """How many branches of sources this worker has taken while it was traced."""
    return sum(map(len, list(tracer.cov._collector.data.values())))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test is traced until it repeats what was counted before, by itself or by another."""
    tracer = tracer_of(item.config)
    if tracer is None or threading.current_thread() is not threading.main_thread():
        return (yield)
    test = item.nodeid.partition("[")[0]
    most = 1 if getattr(getattr(item, "obj", None), "is_hypothesis_test", False) else REPEATS
    known, traced = branches(tracer), True

    def look(*_: object) -> None:
        nonlocal known, traced
        before, known = known, branches(tracer)
        _repeats[test] += known == before
        if traced and known == before and _repeats[test] >= most:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            traced = False
            tracer.pause()

    handler = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, LOOK_CPU_S, LOOK_CPU_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, handler)
        if not traced:
            tracer.resume()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups of tests that share a worker (:mod:`tests.scheduling`)."""
    from tests.scheduling import GroupScheduling

    return GroupScheduling(config, log) if config.getoption("dist") == "load" else None


def skips(config: pytest.Config) -> tuple[Counter[str], list[str]]:
    """How often each allowed reason was given, and every skip without one."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    counts: Counter[str] = Counter()
    others: list[str] = []
    for report in reporter.stats.get("skipped", []) if reporter else []:
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if hasattr(report, "wasxfail"):
            continue
        if name := allowed_as(reason, ci=IN_CI):
            counts[name] += 1
        else:
            others.append(f"{report.nodeid}: {reason}")
    return counts, others


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A skip that is not allowed fails the run."""
    if worker_of(session.config):
        return
    others = skips(session.config)[1]
    if IN_CI and (cache := getattr(session.config, "cache", None)) is not None:
        cache.set("skips/not_allowed", others)
    if exitstatus == 0 and others:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Skips by reason, and those that fail the run."""
    counts, others = skips(config)
    if counts:
        terminalreporter.write_line("skipped: " + ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    if others:
        terminalreporter.section("skipped for a reason that is not allowed (tests/skips.py)", red=True)
        for line in others:
            terminalreporter.write_line(line)
