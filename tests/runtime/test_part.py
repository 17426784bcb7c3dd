"""Parts of joulery in processes of their own: this joulery, whatever lies in the folder, away from this session."""

import os
from pathlib import Path

import pytest

from joulery import __version__
from joulery.runtime.part import start_part


def test_a_part_is_of_this_joulery_in_a_session_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "joulery.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "json.py").write_text("raise SystemExit('nor this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with (tmp_path / "errors").open("wb") as errors, start_part("joulery", ["--version"], errors) as part:
        assert os.getsid(part.pid) == part.pid
        said, _ = part.communicate(timeout=60)
    assert (tmp_path / "errors").read_text() == ""
    assert (part.returncode, __version__ in said.decode()) == (0, True)
