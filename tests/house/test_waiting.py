"""Tests wait for conditions (:mod:`tests.waiting`), never for time: a loaded machine is slow, not wrong.

A sleep is allowed where it *is* the load: a toy that takes long, a moment at which something is killed or cancelled,
or a stretch of time that is measured. Each such file is listed with its reason and its number of sleeps, which may only
fall.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.house.syntax import TESTS, files_in, nodes_of
from tests.waiting import PATIENCE_S, pause_s

CLOCKS = frozenset({"monotonic", "perf_counter", "process_time", "monotonic_ns", "perf_counter_ns", "process_time_ns"})
LOAD = {
    "fakes/open_inference_server.py": (1, "a model that takes so long"),
    "adapters/engines/embedded/test_engine_apply.py": (5, "a change is cancelled at many moments"),
    "adapters/engines/embedded/test_engine_crashes.py": (3, "a worker is killed under load; longer than a hang"),
    "adapters/engines/remote/test_openai_queueing.py": (1, "a fake server writes slowly, on a virtual clock"),
    "adapters/engines/toys.py": (5, "models that take time"),
    "adapters/meters/test_tree.py": (1, "the kernel adds up CPU time every few milliseconds"),
    "benchmarks/test_gpu.py": (1, "one pass of a model"),
    "e2e/slurm_forty.py": (1, "a controller that is away"),
    "e2e/slurm_kills.py": (1, "the scheduler is killed at random moments"),
    "e2e/slurm_plays.py": (2, "jobs are submitted at their times, and sampled four times a second"),
    "e2e/test_measure.py": (1, "a run is interrupted at many moments"),
    "e2e/test_serving.py": (1, "workers are killed under load"),
    "e2e/torch_job.py": (1, "an epoch of a larger model"),
    "gateway/test_app.py": (1, "two chunks that arrive apart"),
    "gateway/test_server.py": (5, "slow clients and slow answers"),
    "runtime/load/test_load.py": (3, "a server that stalls"),
    "runtime/measuring/test_live.py": (1, "a stretch of time that is measured"),
    "runtime/measuring/test_measure.py": (3, "a stretch of time that is measured"),
    "runtime/serving/live_trials.py": (3, "clients that ask again and again"),
    "runtime/session/test_driver.py": (1, "an action that takes longer than a period"),
    "runtime/toy_models.py": (2, "models that take time"),
    "slurm_cluster.py": (1, "killed jobs end before their daemons do"),
}
"""Sleeps that are the load itself: how many, and what they stand for."""
PROGRAMS = frozenset({"e2e/torch_job.py", "e2e/slurm_plays.py"})
"""Programs whose loops are work: a training, a sampler."""


WAITS = frozenset({"wait_until", "eventually", "until"})
SHORT_S = 5.0
"""A limit below this is what is tested."""


def called(node: ast.AST) -> tuple[str, str]:
    """Module and function of a call such as ``time.sleep``; empty for other calls."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return node.func.value.id, node.func.attr
    return "", ""


def clocks_in_asserts(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines of assertions that read a clock of durations, or a name for the difference of two readings of a clock."""
    nodes = list(nodes)
    elapsed = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and any(map(is_elapsed, ast.walk(node.value)))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Assert) and any(
            called(part)[1] in CLOCKS or (isinstance(part, ast.Name) and part.id in elapsed)
            for part in ast.walk(node.test)
        ):
            yield node.lineno


def is_elapsed(node: ast.AST) -> bool:
    """Whether an expression is a reading of a clock less an earlier one."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and reads_a_clock(node.left)


def reads_a_clock(node: ast.AST) -> bool:
    """Whether an expression is a reading of a clock, the wall clock included."""
    module, function = called(node)
    return function in CLOCKS or (module, function) in (("time", "time"), ("time", "time_ns"))


def sleeps(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines of sleeps; ``asyncio.sleep(0)``, which only yields, is none."""
    for node in nodes:
        if called(node) in (("time", "sleep"), ("asyncio", "sleep")):
            assert isinstance(node, ast.Call)
            first = node.args[0] if node.args else None
            if not (isinstance(first, ast.Constant) and first.value == 0):
                yield node.lineno


def least_durations(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines of assertions that a duration which a program reports is longer than so many seconds."""
    for node in nodes:
        compared = ast.walk(node.test) if isinstance(node, ast.Assert) else ()
        if any(_is_least(part) for part in compared if isinstance(part, ast.Compare)):
            yield node.lineno


def _is_least(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    for one, how, other in zip(sides, node.ops, sides[1:], strict=False):
        if isinstance(how, ast.Gt | ast.GtE | ast.Lt | ast.LtE):
            small, large = (one, other) if isinstance(how, ast.Lt | ast.LtE) else (other, one)
            if isinstance(small, ast.Constant) and small.value and _is_duration(large):
                return True
    return False


def _is_duration(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "duration_s"
    return isinstance(node, ast.Attribute) and node.attr == "duration_s"


def polls(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines of loops that sleep until a condition holds."""
    for node in nodes:
        if isinstance(node, ast.While) and not isinstance(node.test, ast.Constant) and any(sleeps(ast.walk(node))):
            yield node.lineno


def hurries(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines that give a program less time to end or to answer than tests.waiting gives a condition."""
    for node in nodes:
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            given = [word.value for word in node.keywords if word.arg == "timeout" or _is_patience(name, word)]
            if any(isinstance(one, ast.Constant) and SHORT_S <= (one.value or 0) < PATIENCE_S for one in given):
                yield node.lineno


def _is_patience(name: str, word: ast.keyword) -> bool:
    return name in WAITS and word.arg == "patience_s"


def files() -> list[tuple[str, Path]]:
    """Names and paths of every file of the tests but the one that waits."""
    return [(path.relative_to(TESTS).as_posix(), path) for path in files_in(TESTS) if path.name != "waiting.py"]


def test_each_fault_is_found() -> None:
    source = "assert time.monotonic() < end_s\nwhile not done():\n    time.sleep(0.1)\nawait asyncio.sleep(0)\n"
    source += "took_s = time.time() - start_s\nassert took_s < 1\nsubprocess.run(line, timeout=60)\n"
    nodes = list(ast.walk(ast.parse(source)))
    assert (list(clocks_in_asserts(nodes)), list(polls(nodes)), list(sleeps(nodes))) == ([1, 6], [2], [3])
    assert list(hurries(nodes)) == [7]
    source = "assert fields['duration_s'] > 0.45\nassert 0 < run.duration_s\nassert 0 < a['duration_s'] < 60\n"
    source += "assert 1 <= b.duration_s\n"
    assert list(least_durations(ast.walk(ast.parse(source)))) == [1, 4]


def test_no_assertion_reads_a_clock() -> None:
    """Assert what happened, not how long it took."""
    found = {name: list(clocks_in_asserts(nodes_of(path))) for name, path in files()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_reported_duration_is_held_against_a_sleep() -> None:
    """Hold it against a stretch that the test or its program took on its own clock (tests.waiting.Stretch)."""
    found = {name: list(least_durations(nodes_of(path))) for name, path in files() if name.startswith("e2e/")}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_nothing_polls_but_the_one_that_waits() -> None:
    """Use tests.waiting."""
    found = {name: list(polls(nodes_of(path))) for name, path in files() if name not in PROGRAMS}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_program_is_hurried() -> None:
    """pytest's own limit ends what hangs; a shorter one ends what is slow because the machine is busy."""
    found = {name: list(hurries(nodes_of(path))) for name, path in files()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_sleeps_are_accounted_for() -> None:
    found = {name: len(list(sleeps(nodes_of(path)))) for name, path in files()}
    assert {name: count for name, count in found.items() if count} == {name: count for name, (count, _) in LOAD.items()}


def test_a_condition_that_takes_long_is_asked_less_often() -> None:
    """One that starts a program each time would keep a core busy by itself."""
    assert [pause_s(asking_s) for asking_s in (0.0, 0.001, 0.1, 60.0)] == [0.02, 0.02, 0.4, 1.0]
