"""What a block of Python imports, and when: the sampler starts first, and without a run directory nothing is kept.

Wall time is measured in docs/benchmarks.md; what makes it is held here.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from joulery.runtime.measuring.sampler_config import SamplerConfig

REPORT = """
import json, sys
started = []
def note(event, details):
    if event == "subprocess.Popen":
        started.append(sorted(sys.modules))
sys.addaudithook(note)
{program}
print(json.dumps([started, sorted(sys.modules)]))
"""
BLOCK = """
import joulery
with joulery.measure(meters=["fake:50"]{options}) as m:
    pass
assert m.footprint.energy_j > 0, m
"""
DECORATED = """
import joulery
@joulery.measured(meters=["fake:50"], then=lambda m: None)
def train(): ...
train()
"""
WINDOWS = """
import joulery
with joulery.Meter(meters=["fake:50"]) as meter, meter.window("epoch") as epoch:
    pass
assert epoch.footprint.duration_s > 0
"""
SAMPLER = """
import json, sys
from joulery.app.sampler import main
code = main(sys.argv[1])
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""
SAMPLER_MODULES = {
    "joulery",
    "joulery.adapters",
    "joulery.adapters.meters",
    "joulery.adapters.meters.cputimes",
    "joulery.adapters.meters.tree",
    "joulery.adapters.presence",
    "joulery.app",
    "joulery.app.sampler",
    "joulery.app.wiring",
    "joulery.app.wiring.meters",
    "joulery.app.wiring.share",
    "joulery.domain",
    "joulery.domain.energy",
    "joulery.domain.energy.channel",
    "joulery.domain.errors",
    "joulery.domain.quality",
    "joulery.runtime",
    "joulery.runtime.measuring",
    "joulery.runtime.measuring.sampler",
    "joulery.runtime.measuring.sampler_config",
    "joulery.runtime.measuring.share",
    "joulery.store",
    "joulery.store.files",
    "joulery.store.run",
    "joulery.store.run.channels",
    "joulery.store.run.samples",
}


def imported(program: str) -> tuple[list[set[str]], set[str]]:
    """What a program had imported whenever it started a process, and at its end."""
    argv = [sys.executable, "-c", REPORT.replace("{program}", program)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    started, at_end = json.loads(ran.stdout)
    return [set(modules) for modules in started], set(at_end)


@pytest.mark.parametrize("program", [BLOCK.replace("{options}", ""), DECORATED], ids=["measure", "measured"])
def test_a_block_in_memory_starts_its_sampler_first_and_imports_no_more_than_the_account(program: str) -> None:
    started, at_end = imported(program)
    assert len(started) == 1
    first = {"numpy", "orjson", "joulery.store.run.directory", "joulery.runtime.measuring.measure"}
    assert not first & started[0]
    assert {"numpy", "joulery.runtime.measuring.account"} <= at_end
    unused = {"pyarrow", "numpy.typing", "numpy.ma", "asyncio", "pydantic", "scipy", "rich", "click", "zipfile"}
    assert not unused & at_end
    stored = {"joulery.store.run.directory", "joulery.store.run.series", "joulery.domain.serving.timeline"}
    assert not stored & at_end


def test_a_block_with_a_run_directory_starts_its_sampler_before_numpy_too(tmp_path: Path) -> None:
    started, at_end = imported(BLOCK.replace("{options}", f", out={str(tmp_path / 'run')!r}"))
    assert len(started) == 1
    assert not {"numpy", "joulery.store.run.series"} & started[0]
    assert "joulery.store.run.series" in at_end
    assert json.loads((tmp_path / "run/manifest.json").read_text())["state"] == "closed"


def test_a_window_starts_no_process_and_imports_no_files() -> None:
    started, at_end = imported(WINDOWS)
    assert started == []
    unused = {"pyarrow", "numpy.typing", "numpy.ma", "asyncio", "orjson", "joulery.runtime.measuring.sampling"}
    assert not unused & at_end
    assert not {name for name in at_end if name.startswith("joulery.store")}


@pytest.mark.parametrize(
    ("meter", "further"),
    [
        ('{"kind": "fake", "options": {"channels": [{"watts": [[0, 50]]}]}}', {"joulery.adapters.meters.fake"}),
        ('{"kind": "cpu-model", "options": {}}', {"joulery.adapters.meters.cpu_model"}),
    ],
    ids=["fake", "cpu-model"],
)
def test_the_sampler_imports_a_small_named_set(tmp_path: Path, meter: str, further: set[str]) -> None:
    config = SamplerConfig(str(tmp_path), 1, 1, False, 0.01, 0.03).to_json()
    config = json.dumps({**json.loads(config), "meters": [json.loads(meter)]})
    argv = [sys.executable, "-P", "-c", SAMPLER, config]
    ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    code, modules = json.loads(ran.stderr)
    assert code == 0
    assert {name for name in modules if name.split(".")[0] == "joulery"} == SAMPLER_MODULES | further
    heavy = {"numpy", "orjson", "asyncio", "inspect", "dataclasses", "subprocess", "socket", "tempfile", "pynvml"}
    assert not (heavy - ({"dataclasses", "inspect"} if "fake" in meter else set())) & set(modules)


def test_a_fork_that_ends_within_the_block_takes_nothing_of_it(tmp_path: Path) -> None:
    """It ends as programs do, by its last line: what was opened for the block is its parent's."""
    program = """
import json, os, sys, tempfile
tempfile.tempdir = sys.argv[1]
import joulery
with joulery.measure(meters=["fake:50"]) as m:
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
print(json.dumps([m.footprint.coverage_ratio, m.footprint.energy_j]))
"""
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    coverage_ratio, energy_j = json.loads(ran.stdout)
    assert coverage_ratio > 0.9
    assert energy_j > 0
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_keeps_nothing_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import tempfile; tempfile.tempdir = sys.argv[1]\nimport joulery\n"
        + """
with joulery.measure(meters=["fake:50"]) as m:
    inside = sorted(str(p.relative_to(sys.argv[1])) for p in __import__("pathlib").Path(sys.argv[1]).rglob("*.*"))
print(json.dumps([name.split("/", 1)[1] for name in inside]))
"""
    )
    argv = [sys.executable, "-c", "import json, sys\n" + program, str(tmp_path)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=True)
    written = json.loads(ran.stdout)
    assert written
    assert {name.split("/")[0] for name in written} == {"samples"}
    assert list(tmp_path.iterdir()) == []
