"""Lines that the solver prints by itself do not reach standard output; everything else does."""

import subprocess
import sys

PROGRAM = """
import ctypes
from joulery.ui.cli.native_output import without_solver_lines
native = ctypes.CDLL(None)
native.puts(b"before")
try:
    with without_solver_lines():
        native.puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        native.puts(b"native")
        print("python")
        if FAILS:
            raise ValueError
except ValueError:
    print("failed")
native.puts(b"HighsMipSolverData::afterwards")
print("after")
"""


def said(program: str, **more: object) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, **more)
    assert done.stderr == ""
    return sorted(done.stdout.splitlines())


def test_the_solvers_lines_are_dropped_and_all_others_kept():
    lines = ["HighsMipSolverData::afterwards", "after", "before", "native", "python"]
    assert said(PROGRAM.replace("FAILS", "False")) == lines
    assert said(PROGRAM.replace("FAILS", "True")) == sorted([*lines, "failed"])


def test_without_a_standard_output_nothing_fails():
    program = "import os; os.close(1)\n" + PROGRAM.replace("FAILS", "False").replace("print", "(lambda _: None)")
    assert said(program) == []
