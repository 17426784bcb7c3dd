"""Parts of joulery in processes of their own: this joulery, whatever lies in the folder, away from this session."""

import os
from pathlib import Path

import pytest

from joulery import __version__
from joulery.app.schedule import ScheduleRequest, start_watchdog
from joulery.runtime.load import LoadPlan, start
from joulery.runtime.process import spawn_process


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files named like modules."""
    (tmp_path / "joulery.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "json.py").write_text("raise SystemExit('nor this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def test_a_part_is_of_this_joulery_in_a_session_of_its_own(hostile: Path) -> None:
    with (hostile / "errors").open("wb") as errors, spawn_process("joulery", ["--version"], errors) as part:
        assert os.getsid(part.pid) == part.pid
        said, _ = part.communicate()
    assert (hostile / "errors").read_text() == ""
    assert (part.returncode, __version__ in said.decode()) == (0, True)


def test_the_watchdog_of_a_scheduler_is_not_of_the_folder_either(hostile: Path) -> None:
    with start_watchdog(ScheduleRequest(hostile / "away.yaml"), "slurm", 1.0, hostile / "log") as dog:
        assert dog.wait() != 0
    said = (hostile / "log").read_text()
    assert "this one" not in said and "away.yaml" in said


def test_nor_is_the_load_generator(hostile: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = LoadPlan("http://127.0.0.1:1", "toy", str(hostile / "away.npz"), str(hostile / "o.parquet"), rate_rps=1.0)
    with start(plan) as load:
        load.communicate()
    said = capfd.readouterr().err
    assert "this one" not in said and "away.npz" in said
