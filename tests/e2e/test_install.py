"""The wheel in an empty environment: small, it measures and reports, and names the extra that a command needs."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE_MB = 120
NO_BYTE_CODE = {"PIP_NO_COMPILE": "no"}
"""As ``--no-compile``, whose variable pip reads the other way round: what is imported is compiled then."""


@pytest.fixture(scope="module")
def first_figure(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The README's own lines in an empty home, without any variable of this process: the home, and how they ended."""
    home = tmp_path_factory.mktemp("home")
    (lines,) = re.findall(r"first figure:\n\n```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    keep = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "PATH"}
    done = subprocess.run(
        ["bash", "-euc", lines],
        cwd=ROOT,
        env={**keep, **NO_BYTE_CODE, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "hatchling" in done.stderr and done.returncode:
        pytest.skip("no package index here")
    return home, done


@pytest.fixture(scope="module")
def installed(first_figure: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    """The environment of the README's lines: joulery and what its core needs, and pip."""
    home, done = first_figure
    assert done.returncode == 0, done.stderr
    return home / "joulery-env"


def joulery(installed: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    command = [str(installed / "bin/joulery"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment, check=False)


def test_the_core_is_small(installed):
    """Beside pip, which any environment has, and the byte code of what was imported."""
    (packages,) = installed.glob("lib/python*/site-packages")
    files = [path for path in installed.rglob("*") if path.is_file() and not path.is_symlink()]
    own = [path for path in files if not path.is_relative_to(packages / "pip") and "__pycache__" not in path.parts]
    assert packages / "joulery/__init__.py" in own
    assert sum(path.stat().st_size for path in own) <= CORE_MB * 1e6


def test_the_core_measures_reports_accounts_and_says_what_it_can_read(installed, tmp_path):
    measured = joulery(installed, tmp_path, "measure", "--json", "--out", "run", "--", "sleep", "0.3")
    assert measured.returncode == 0, measured.stderr
    energy_j = json.loads(measured.stderr)["energy_j"]
    reported = joulery(installed, tmp_path, "report", "run", "--json")
    assert reported.returncode == 0, reported.stderr
    assert json.loads(reported.stdout)["energy_j"] == pytest.approx(energy_j, rel=1e-9) and energy_j > 0
    assert (tmp_path / "run" / "power.npz").exists()
    (tmp_path / "e.csv").write_text("op,start_ns,dur_ns,device\na,0,6000,CPU:0\nb,6000,2000,CPU:0\n")
    (tmp_path / "p.csv").write_text("t_ns,device,power_w\n0,CPU:0,10\n8000,CPU:0,10\n")
    files = ("--events", "e.csv", "--power", "p.csv", "--json", "--out", "accounted")
    accounted = joulery(installed, tmp_path, "account", *files)
    assert accounted.returncode == 0, accounted.stderr
    assert {row["op"]: row["energy_j"] for row in json.loads(accounted.stdout)["ops"]} == pytest.approx(
        {"a": 60e-6, "b": 20e-6}
    )
    again = joulery(installed, tmp_path, "report", "accounted", "--by", "op", "--json")
    assert again.returncode == 0, again.stderr
    assert joulery(installed, tmp_path, "doctor", "--json").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("plan", str(ROOT / "examples/igniter-12.yaml")), "plan"),
        (("up", str(ROOT / "examples/quickstart.yaml")), "serve"),
        (("measure", "--carbon", "hours.parquet", "--", "true"), "parquet"),
    ],
    ids=["plan", "up", "parquet"],
)
def test_a_command_that_needs_an_extra_says_which(installed, tmp_path, arguments, extra):
    (tmp_path / "hours.parquet").write_bytes(b"PAR1")
    refused = joulery(installed, tmp_path, *arguments)
    assert refused.returncode == 2
    assert f"pip install 'joulery[{extra}]'" in refused.stderr and "Traceback" not in refused.stderr


def test_the_readme_leads_from_nothing_to_a_first_figure(first_figure):
    home, done = first_figure
    assert done.returncode == 0, done.stderr
    assert re.search(r"energy +[\d.]+ m?J ", done.stderr)
    assert re.search(r"carbon +[\d.]+ [mµ]?g ", done.stderr)
    assert list((home / "runs").glob("*"))


def test_the_lowest_versions_are_those_of_the_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ranges = [
        *project["dependencies"],
        *(r for name in ("plan", "parquet", "serve", "export", "nvidia", "vision", "grpc") for r in extras[name]),
    ]
    lowest = dict(re.findall(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(ranges)))
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "requirements/lowest.txt").read_text(), re.MULTILINE))
    assert lowest.keys() == pinned.keys()
    for name, version in lowest.items():
        assert f"{pinned[name]}.".startswith(f"{version}."), name
