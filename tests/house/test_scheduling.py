"""Groups of tests share a worker, and half of the workers begin with tests that wait for programs."""

import ast
import re
import subprocess
import sys

from tests.house.syntax import ROOT, TESTS, files_in, nodes_of
from tests.house.test_skips import environment
from tests.scheduling import group_of, spread, waits

FORKLESS = {"jax", "tensorflow"}


def test_files_of_one_group_and_of_one_fixture_stay_together() -> None:
    assert group_of("tests/e2e/test_up.py::test_a[1]") == group_of("tests/e2e/test_up_plan.py::test_b") == "up"
    assert group_of("tests/sim/serving/test_mixed_table.py::test_a") == "tests/sim/serving/test_mixed_table.py"
    shared = "tests/sim/training/test_study.py"
    assert group_of(f"{shared}::test_a[1]") == group_of(f"{shared}::test_b") == shared, "its results are kept by @cache"
    assert group_of("tests/domain/test_format.py::test_si[None]") == "tests/domain/test_format.py::test_si[None]"


def test_every_test_has_one_place_and_folders_are_mixed() -> None:
    ids = [f"tests/domain/test_format.py::test_{k}" for k in range(40)]
    ids += [f"tests/runtime/serving/test_controller.py::test_{k}" for k in range(4)]
    order = spread(ids)
    assert sorted(order) == list(range(44))
    assert [place for place, at in enumerate(order) if at >= 40] == [1, 12, 23, 34]


def test_what_waits_for_programs_comes_last_and_its_largest_group_at_the_end() -> None:
    ids = [f"tests/e2e/test_up.py::test_{k}" for k in range(2)]
    ids += ["tests/e2e/test_measure.py::test_a", "tests/domain/test_format.py::test_b"]
    assert [ids[place] for place in spread(ids)] == [ids[3], ids[2], ids[0], ids[1]]
    assert waits("tests/benchmarks/test_kills.py::test_a") and not waits("tests/golden/test_headlines.py::test_a")


def passed(*arguments: str) -> dict[str, list[str]]:
    """The tests that each of two workers passed, in their order, with the version of xdist at hand."""
    options = ["-n", "2", "--no-loadscope-reorder", "-v", "-p", "no:cacheprovider"]
    kept = environment(ci=False) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
    line = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(line, cwd=ROOT, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[str]] = {"gw0": [], "gw1": []}
    for worker, name in re.findall(r"^\[(gw\d)\].* PASSED (\S+)", done.stdout, re.MULTILINE):
        found[worker].append(name)
    return found


def test_a_group_runs_in_one_worker() -> None:
    tests = ["tests/sim/serving/test_mixed_table.py", "tests/domain/test_format.py"]
    workers = passed("-k", "test_mixed_table or test_si", *tests)
    assert len([names for names in workers.values() if any("mixed_table" in name for name in names)]) == 1
    assert all(workers.values())


def test_one_of_two_workers_begins_with_what_waits() -> None:
    workers = passed("tests/contract/test_carbon_source.py", "tests/domain/test_format.py")
    assert workers["gw0"][0].startswith("tests/domain/") and workers["gw1"][0].startswith("tests/contract/")


def test_no_test_imports_what_refuses_forks_in_its_own_process() -> None:
    """JAX and TensorFlow start threads: what forks in the same worker later fails, whichever test that is."""
    found = []
    for file in files_in(TESTS):
        if "corpus" in file.parts:
            continue  # programs of their own
        for node in nodes_of(file):
            named = [node.module] if isinstance(node, ast.ImportFrom) else []
            named = [one.name for one in node.names] if isinstance(node, ast.Import) else named
            found += [f"{file.name}:{node.lineno}" for name in named if (name or "").split(".")[0] in FORKLESS]
    assert found == []
