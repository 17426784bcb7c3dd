"""Runs the end-to-end tests that failed in the last run once more, each alone.

``python -m tests.once_more CACHE [FLOOR]``: pytest's cache folder of that run, and the floor of its coverage, %.

A test that starts servers or a cluster may fail for the load of the other workers. That is a defect, of the test or of
the product: CI's last lines name it, so that it is mended, and the run goes on. The run fails if another kind of test
failed, if more than ``MOST`` did, if one fails alone too, if a test was skipped for a reason that is not allowed, or if
coverage is below its floor.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAST_FAILED, NOT_ALLOWED = Path("v/cache/lastfailed"), Path("v/skips/not_allowed")
"""In the cache folder: where pytest keeps what failed, and ``tests/conftest.py`` skips without an allowed reason."""
STARTS_PROGRAMS = ("tests/e2e/", "tests/contract/", "tests/docs/test_commands.py::test_the_commands_of_a_page_run[")
MARKED = re.compile(r"^pytestmark = .*\bpytest\.mark\.e2e\b", re.MULTILINE)
"""A file all of whose tests start programs, wherever it is: a browser, a server."""
MOST = 4


def starts_programs(name: str) -> bool:
    """Whether a test starts programs."""
    file = ROOT / name.partition("::")[0]
    return name.startswith(STARTS_PROGRAMS) or (file.exists() and bool(MARKED.search(file.read_text(encoding="utf-8"))))


def judged(failed: list[str]) -> str | None:
    """Why the failures of a run are final; None where each may run once more."""
    if not failed:
        return "no test failed: something else did"
    if others := [name for name in failed if not starts_programs(name)]:
        return f"{others[0]} starts no program: it fails for a reason of its own"
    if len(failed) > MOST:
        return f"{len(failed)} tests failed, and {MOST} may run once more"
    return None


def passes(*command: str) -> bool:
    """Whether a command exits with 0."""
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode == 0


def kept(file: Path) -> list[str]:
    """The names in a file of pytest's cache; none where it wrote none."""
    return sorted(json.loads(file.read_text())) if file.exists() else []


def main(cache: Path, floor: str = "") -> int:
    """Exit code 0 where every failed test passes alone."""
    failed, skipped = kept(cache / LAST_FAILED), kept(cache / NOT_ALLOWED)
    if final := f"skipped: {skipped[0]}" if skipped else judged(failed):
        print(f"not run once more: {final}")
        return 1
    if floor and not passes("coverage", "report", "--format=total", f"--fail-under={floor}"):
        return 1
    for name in failed:
        if not passes("pytest", "-q", "--no-cov", "-o", f"cache_dir={cache}-alone", name):
            return 1
    for name in failed:
        print(f"UNSTEADY (failed beside other tests, passed alone; mend it): {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(ROOT / sys.argv[1], *sys.argv[2:]))
