"""A bar that was not run is never printed as one that holds, and the exit code says so."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import NotRun, Result, __main__, green, green_speed, muserve, placement

BAR = ("at most 1 s", True)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A benchmark named ``made_up``, whose ``run`` the test replaces; the page is a file of the test."""
    module = ModuleType("benchmarks.made_up")
    monkeypatch.setitem(sys.modules, "benchmarks.made_up", module)
    monkeypatch.setattr(__main__, "names", lambda: ["made_up"])
    monkeypatch.setattr(__main__, "PAGE", tmp_path / "benchmarks.md")
    return module


def made(*checks: tuple[str, bool | None]) -> Result:
    return Result("Made up", ("what",), [("a figure",)], checks=checks)


@pytest.mark.parametrize(
    ("checks", "code", "verdict"),
    [
        ((BAR,), 0, "- holds: at most 1 s"),
        (((BAR[0], False),), 1, "- **missed**: at most 1 s"),
        ((BAR, ("other", None)), 3, "- **not run**: other"),
        ((("other", None), (BAR[0], False)), 1, "- **not run**: other"),
        ((), 3, "a figure"),
    ],
)
def test_the_exit_code_separates_held_missed_and_not_run(
    benchmark: ModuleType,
    capsys: pytest.CaptureFixture[str],
    checks: tuple[tuple[str, bool | None], ...],
    code: int,
    verdict: str,
) -> None:
    benchmark.run = lambda: made(*checks)  # type: ignore[attr-defined]
    assert __main__.main(["made_up"]) == code
    assert verdict in capsys.readouterr().out


def test_a_benchmark_without_its_data_says_what_is_missing_and_leaves_the_page(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.run = lambda: made(BAR)  # type: ignore[attr-defined]
    assert __main__.main(["--write", "made_up"]) == 0
    page = __main__.PAGE.read_text()

    def absent() -> Result:
        raise NotRun("no data in /nowhere")

    for run in (absent, lambda: made(BAR, ("other", None))):
        benchmark.run = run  # type: ignore[attr-defined]
        assert __main__.main(["--write", "made_up"]) == 3
        assert "**not run**" in capsys.readouterr().out
        assert __main__.PAGE.read_text() == page


@pytest.mark.parametrize("module", [muserve, green, green_speed])
def test_benchmarks_of_the_data_set_do_not_run_without_it(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JOULERY_DATA", str(tmp_path))
    with pytest.raises(NotRun, match="JOULERY_DATA"):
        module.run()


def test_traces_of_real_gpus_that_are_absent_do_not_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JOULERY_DATA", str(tmp_path))
    rows, close = placement._traces()
    assert close is None
    assert "not run" in rows[0][1]


def test_no_seed_that_may_be_judged_is_not_a_seed_that_holds() -> None:
    names = ("fixed", "predictive", "best-static", "miad-literal")
    late = {name: muserve.ClockOutcome(100.0, 0.9, 1.0, 0) for name in names}
    assert muserve._judged([late], 1.4)[1] is None


def test_help_and_bad_options_run_nothing(capsys):
    for arguments, code in ((["--help"], 0), (["--frobnicate"], 2), (["--json"], 2)):
        with pytest.raises(SystemExit) as stopped:
            __main__.main(arguments)
        assert stopped.value.code == code
    assert "provision" in capsys.readouterr().out
    assert __main__.main(["no_such_benchmark"]) == 2
