"""``make test`` of a fresh clone has no training framework: what needs one is skipped, and nothing else notices."""

import os
import subprocess
import sys

from tests.house.syntax import ROOT, TESTS

FRAMEWORKS = "accelerate", "grpc", "jax", "lightning", "ray", "tensorflow", "torch", "transformers", "tritonclient"
"""What CI installs beside the locked packages, and the environments of their own."""
COLLECT = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {FRAMEWORKS} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_every_test_can_be_collected_without_them() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {"CI": ""}
    line = [sys.executable, "-c", COLLECT, str(TESTS)]
    done = subprocess.run(line, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "torch is not installed" in done.stdout
