"""``joulery up`` and ``joulery serve``: a site that cannot be run, before anything is made; a run is tested in e2e."""

from pathlib import Path

import pytest

from tests.command import joulery

TWELVE = Path(__file__).resolve().parents[3] / "examples" / "igniter-12.yaml"


@pytest.mark.parametrize("verb", ["up", "serve"])
def test_a_service_without_models_is_named_before_anything_is_made(tmp_path, verb):
    line = 1 + next(at for at, text in enumerate(TWELVE.read_text().splitlines()) if "name: W1," in text)
    done = joulery(verb, TWELVE, "--out", tmp_path / "run")
    assert done.returncode == 2 and done.stdout == ""
    assert f"igniter-12.yaml:{line} services.0: " in done.stderr
    assert "W1" in done.stderr and "alexnet" in done.stderr and "services.0.family" in done.stderr
    assert not (tmp_path / "run").exists()
