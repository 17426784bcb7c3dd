"""Groups of tests share a worker, and waiting tests are spread over the run."""

import subprocess
import sys

from tests.house.syntax import ROOT
from tests.house.test_skips import environment
from tests.scheduling import group_of, spread


def test_files_of_one_group_and_of_one_fixture_stay_together() -> None:
    assert group_of("tests/e2e/test_up.py::test_a[1]") == group_of("tests/e2e/test_up_plan.py::test_b") == "up"
    assert group_of("tests/sim/serving/test_mixed_table.py::test_a") == "tests/sim/serving/test_mixed_table.py"
    shared = "tests/sim/training/test_study.py"
    assert group_of(f"{shared}::test_a[1]") == group_of(f"{shared}::test_b") == shared, "its results are kept by @cache"
    assert group_of("tests/domain/test_format.py::test_si[None]") == "tests/domain/test_format.py::test_si[None]"


def test_every_test_has_one_place_and_folders_are_mixed() -> None:
    ids = [f"tests/domain/test_format.py::test_{k}" for k in range(40)]
    ids += [f"tests/runtime/measuring/test_live.py::test_{k}" for k in range(4)]
    order = spread(ids)
    assert sorted(order) == list(range(44))
    assert [place for place, at in enumerate(order) if at >= 40] == [1, 12, 23, 34]


def test_a_group_runs_in_one_worker() -> None:
    """With the version of xdist at hand."""
    tests = ["tests/sim/serving/test_mixed_table.py", "tests/domain/test_format.py"]
    options = ["-n", "2", "--no-loadscope-reorder", "-v", "-k", "test_mixed_table or test_si", "-p", "no:cacheprovider"]
    line = [sys.executable, "-m", "pytest", *options, *tests]
    kept = environment(ci=False) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
    done = subprocess.run(line, cwd=ROOT, env=kept, capture_output=True, text=True)
    lines = [part for part in done.stdout.splitlines() if "PASSED" in part]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({part.split("]")[0] for part in lines if "mixed_table" in part}) == 1
    assert len({part.split("]")[0] for part in lines}) == 2
