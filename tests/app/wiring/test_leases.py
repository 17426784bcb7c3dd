"""What doctor says of leases, and having everything back."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from joulery.app.wiring.leases import lease_statuses, reset_everything
from joulery.domain.errors import ActuationError
from joulery.domain.gpu.device import DeviceSpec, Lease, Owner
from joulery.store.leases import LeaseBook, owner_of
from joulery.ui.cli import main
from tests.fakes.cpufreq import cpufreq_tree, settings


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LeaseBook:
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path / "state"))
    return LeaseBook()


@pytest.fixture
def left(tmp_path: Path, book: LeaseBook) -> Lease:
    """What a process that is gone left behind: a clock at half its speed."""
    tree = cpufreq_tree(tmp_path / "cpu")
    before = settings(tree)
    (tree / "cpufreq/policy0/scaling_max_freq").write_text("1600000\n")
    spec = DeviceSpec("cpufreq", {"root": str(tree)})
    gone = Owner(2**22 + 1, 5, "some boot", "joulery")
    lease = Lease("cpu", spec, {"files": before}, "at most 1600 MHz", "a test", gone, 0.0, 10.0)
    book.write(lease)
    return lease


def test_states(book: LeaseBook, left: Lease) -> None:
    assert [(lease.name, lease.state) for lease in lease_statuses()] == [("cpu.clock", "abandoned")]
    me = owner_of(os.getpid(), "pytest")
    assert me is not None
    book.write(replace(left, owner=me, lasts_s=60.0))
    assert lease_statuses()[0].state == "held"
    assert "at most 1600 MHz" in lease_statuses()[0].detail
    book.write(replace(left, owner=me, lasts_s=-1.0))
    assert lease_statuses()[0].state == "expired"
    (book.folder / "gpu-0.mig.json").write_text("nonsense")
    assert [lease.state for lease in lease_statuses()] == ["expired", "damaged"]


def test_everything_goes_back(book: LeaseBook, left: Lease, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--reset"]) == 0
    assert "-> full clock" in capsys.readouterr().out
    root = Path(left.spec.options["root"])
    assert settings(root) == left.before["files"]
    assert book.names() == ()
    assert main(["doctor", "--reset", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reset"] == []


def test_settings_that_cannot_revert_are_reported_and_the_rest_reverts(book: LeaseBook, left: Lease) -> None:
    (book.folder / "a.clock.json").write_text("nonsense")
    with pytest.raises(ActuationError, match=r"a\.clock: .*not a lease") as caught:
        reset_everything()
    assert caught.value.left_dirty == ("a.clock",)
    assert len(caught.value.applied) == 1
    assert book.names() == ("a.clock",)
