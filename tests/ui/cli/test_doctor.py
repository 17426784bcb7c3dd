import json

import pytest

from joulery.app import doctor
from joulery.app.doctor import Check, Status
from joulery.ui.cli import main
from joulery.ui.cli.doctor import _AREAS, _MARKS

CHECKS = (
    Check("energy", "rapl", Status.DENIED, "may not be read", "sudo do it"),
    Check("energy", "nvml", Status.ABSENT, "no driver", advice="install one"),
    Check("share", "CPU time", Status.OK, "exact"),
)


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: CHECKS)


def test_every_status_and_area_has_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(_MARKS) == set(Status)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "! rapl: may not be read\n      to enable it: sudo do it\n" in text
    assert "– nvml: no driver\n      install one\n" in text
    assert text.count("Energy: what measures it") == 1
    assert "Share: energy by process\n  ✓ CPU time: exact" in text
    assert _AREAS.keys() >= {check.area for check in CHECKS}


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "joulery.doctor/1"
    assert found["checks"][0] == {
        "area": "energy",
        "name": "rapl",
        "status": "denied",
        "detail": "may not be read",
        "grant": "sudo do it",
        "advice": "",
    }
    assert set(found["machine"]) == {"processor", "cpus", "model", "system", "virtual"}
