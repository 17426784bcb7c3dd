"""``with joulery.measure() as m``: a block of Python in this very process."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

import pytest

import joulery
from joulery.app.measuring import moment_s
from joulery.domain.energy.carbon import Signal
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.quality import Quality
from joulery.runtime.measuring.terms import MeasureWarning
from joulery.store.run.directory import open_run
from tests.waiting import sampled

BURN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"


def burn(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def children() -> set[int]:
    own = os.getpid()
    return {int(pid) for task in Path(f"/proc/{own}/task").iterdir() for pid in (task / "children").read_text().split()}


def test_a_block_is_measured_with_its_threads_and_children() -> None:
    before = children()
    with joulery.measure(carbon="360 g/kWh", meters=["fake:100"], owner="nlp") as m:
        thread = threading.Thread(target=burn, args=(0.2,))
        thread.start()
        burn(0.2)
        thread.join()
        subprocess.run([sys.executable, "-c", BURN.format(0.3)], check=True)
    footprint = m.footprint
    assert footprint.coverage_ratio == pytest.approx(1.0, abs=0.01)
    total_j = footprint.energy_j + m.other_j + m.report["other_idle_j"]
    assert total_j == pytest.approx(100 * footprint.duration_s, rel=0.02)
    assert m.report["cpu_s"] >= 0.45
    assert footprint.carbon_g == pytest.approx(footprint.energy_j * 360 / 3.6e6)
    assert (footprint.signal, footprint.quality) == (Signal.AVERAGE, Quality.ASSUMED)
    assert children() == before
    assert m.path is None


def test_each_call_of_a_measured_function_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[joulery.Measurement] = []

    @joulery.measured(meters=["fake:100"], then=found.append)
    def add(a: int, b: int) -> int:
        """Adds."""
        burn(0.05)
        return a + b

    @joulery.measured(meters=["fake:100"], then=found.append)
    async def add_later(a: int, *, b: int) -> int:
        await asyncio.sleep(0)
        return a + b

    assert (add(1, b=2), asyncio.run(add_later(1, b=3)), add.__doc__) == (3, 4, "Adds.")
    assert [one.footprint.energy_j > 0 for one in found] == [True, True]
    assert str(found[0]) == str(found[0].footprint) and "<table>" in found[0]._repr_html_()

    @joulery.measured(meters=["fake:100"], then=found.append)
    def fails() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        fails()
    assert len(found) == 3 and found[2].footprint.duration_s > 0, "a call that failed has used its energy"
    joulery.measured(abs)(-1)
    assert re.search(r"^abs: .*J .*no carbon source", capsys.readouterr().err)


def test_a_run_that_is_kept_is_a_run_like_any_other(tmp_path: Path) -> None:
    with joulery.measure(out=tmp_path / "run", meters=["fake:10"], idle="none", pue=1.2, owner="nlp") as m:
        time.sleep(0.05)
    run = open_run(tmp_path / "run")
    assert m.path == tmp_path / "run"
    assert run.report == m.report
    assert (run.manifest["owner"], run.manifest["state"], run.manifest["argv"]) == ("nlp", "closed", [])
    assert run.manifest["terms"] == {"idle": "none", "pue": 1.2, "carbon": {}, "carbon_at_s": None}
    assert m.report["carbon_g"] is None
    with pytest.raises(ConfigError, match="already holds a run"), joulery.measure(out=tmp_path / "run"):
        raise AssertionError("never entered")


def test_nothing_is_left_of_a_run_that_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with joulery.measure(meters=["fake:10"]):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_block_is_the_blocks_and_what_it_cost_is_known() -> None:
    with pytest.raises(ZeroDivisionError), joulery.measure(meters=["fake:10"]) as m:
        raise ZeroDivisionError
    assert m.footprint.duration_s > 0


def test_before_the_end_nothing_is_known() -> None:
    with joulery.measure(meters=["fake:10"]) as m, pytest.raises(ConfigError, match="footprint"):
        _ = m.footprint


def test_blocks_may_lie_inside_one_another() -> None:
    with joulery.measure(meters=["fake:10"]) as outer:
        with joulery.measure(meters=["fake:10"]) as inner:
            burn(0.1)
        burn(0.1)
    assert outer.footprint.duration_s > inner.footprint.duration_s
    assert outer.footprint.energy_j > inner.footprint.energy_j


def test_a_block_in_a_thread_that_ends_is_measured_to_its_end() -> None:
    """The kernel signals the sampler that its starting thread is gone; the process is not."""
    measurement = joulery.measure(meters=["fake:10"])
    thread = threading.Thread(target=measurement.__enter__)
    thread.start()
    thread.join()
    time.sleep(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measurement.__exit__(None, None, None)
    assert measurement.footprint.coverage_ratio == pytest.approx(1.0, abs=0.01)


def test_a_fork_that_leaves_the_block_leaves_the_run_to_its_parent(tmp_path: Path) -> None:
    script = (
        "import os, joulery\n"
        f"with joulery.measure(out={str(tmp_path / 'run')!r}, meters=['fake:10']) as m:\n"
        "    child = os.fork()\n"
        "    if child: os.waitpid(child, 0)\n"
        "print('child' if child == 0 else m.footprint.duration_s > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["child", "True"], "")
    assert open_run(tmp_path / "run").closed


def test_a_sampler_that_breaks_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('something broke', file=sys.stderr)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.warns(MeasureWarning, match="the sampler failed: something broke"), joulery.measure(meters=["fake:10"]):
        pass


def test_a_sampler_that_dies_is_a_warning_and_a_lower_coverage(tmp_path: Path) -> None:
    before, run = children(), tmp_path / "run"
    with pytest.warns(MeasureWarning, match="ended by signal 9"), joulery.measure(meters=["fake:10"], out=run) as m:
        sampled(run)
        (sampler,) = children() - before
        os.kill(sampler, signal.SIGKILL)
        time.sleep(0.4)
    assert 0.0 < m.footprint.coverage_ratio < 1.0


def test_no_sampler_at_all_is_a_warning_and_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    ran = []
    with pytest.warns(MeasureWarning, match="nothing may be measured"), joulery.measure() as m:
        ran.append(True)
    assert ran == [True]
    assert m.report["energy_j"] is None
    assert m.footprint.coverage_ratio == 0.0


@pytest.mark.parametrize("kept", [True, False])
def test_a_meter_that_was_named_must_be_there_and_nothing_is_left_behind(tmp_path: Path, kept: bool) -> None:
    before, out = children(), tmp_path / "run" if kept else None
    with pytest.raises(CapabilityError), joulery.measure(meters=["nvml"], out=out):
        raise AssertionError("never entered")
    assert list(tmp_path.iterdir()) == []
    assert children() == before


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"zone": "Atlantis"}, ConfigError),
        ({"carbon": "nothing.csv"}, (ConfigError, DataError)),
        ({"idle": "half"}, ConfigError),
        ({"period_s": 0.0}, ConfigError),
        ({"pue": 0.5}, ConfigError),
        ({"meters": ["rappl"]}, ConfigError),
        ({"carbon": "1 g/kWh", "carbon_at": "tomorrow"}, ConfigError),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        joulery.measure(**arguments)  # type: ignore[arg-type]


def test_a_moment_in_its_forms() -> None:
    assert moment_s("2020-06-10T12:00Z") == moment_s("2020-06-10T14:00+02:00") == 1591790400.0
    assert moment_s("2020-06-10T12:00") == moment_s(datetime(2020, 6, 10, 12, tzinfo=UTC)) == 1591790400.0
    assert moment_s(datetime(2020, 6, 10, 12)) == 1591790400.0  # noqa: DTZ001
    assert moment_s(12.5) == 12.5
    with pytest.raises(ConfigError, match="not a time"):
        moment_s("noon")
