"""Commands of joulery's own loops import numpy without a pool of threads that wait busily."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os, sys
def imported(event, arguments):
    if event == "import" and arguments[0] == "numpy":
        os.write(2, f"numpy with {os.environ.get('OPENBLAS_NUM_THREADS')} threads\\n".encode())
sys.addaudithook(imported)
from joulery.ui.cli import main
sys.exit(main(sys.argv[1:]))
"""


def said(arguments: list[str], threads: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    environment |= {"OPENBLAS_NUM_THREADS": threads} if threads else {}
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "--once", "--meter", "fake:50"],
        ["agent", "none.yaml", "--orders", "{}"],
        ["schedule", "none.yaml"],
        ["up", "none.yaml"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_numpy_is_imported_once_it_is_on_one_thread(arguments: list[str]) -> None:
    assert set(filter(lambda line: line.startswith("numpy"), said(arguments).splitlines())) == {"numpy with 1 threads"}


def test_a_number_of_threads_that_the_user_sets_stays() -> None:
    assert "numpy with 3 threads" in said(["up", "none.yaml"], threads="3").splitlines()
