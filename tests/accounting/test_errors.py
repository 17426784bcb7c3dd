"""Standard errors over steps, and what a comparison calls significant."""

from pathlib import Path

import numpy as np
import pytest

from joulery.accounting.operations.align import align
from joulery.accounting.operations.rows import added, rolled_up
from joulery.accounting.steps import PowerSteps
from joulery.app.runs.anatomies import RunAnatomy
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace
from joulery.store.run.directory import create_run, open_run
from joulery.ui.reports.anatomy.comparison import compare

STEP_NS = 10_000_000
OPS = 6


def session(seed: int, steps: int = 12, factor: float = 1.0, noise: float = 0.05) -> TensorFootprint:
    """Steps of six operations of 1 to 2 ms at 50 to 100 W, each with its own power each time."""
    rng = np.random.default_rng(seed)
    length = np.linspace(1_000_000, 2_000_000, OPS).astype(np.int64)
    start = np.arange(steps)[:, None] * STEP_NS + (np.cumsum(length) - length)[None, :]
    watts = np.linspace(50, 100, OPS)[None, :] * rng.normal(1, noise, (steps, OPS))
    watts[:, 0] *= factor
    trace = EventTrace(
        [f"net/op{i}" for i in range(OPS)],
        ["GPU:0"],
        ["forward"],
        op=np.tile(np.arange(OPS), steps),
        start_ns=start.ravel(),
        dur_ns=np.tile(length, steps),
        device=np.zeros(steps * OPS),
        lane=np.zeros(steps * OPS),
        phase=np.zeros(steps * OPS),
    )
    edges = np.column_stack([start, np.arange(1, steps + 1) * STEP_NS - 1_000_000]).ravel()
    power = np.column_stack([watts, np.full(steps, 20.0)]).ravel()
    channel = Channel("GPU:0", "board", ReadingKind.POWER, "fake", Quality.MEASURED)
    meter = PowerSteps(channel, np.append(edges, steps * STEP_NS), power)
    return align(trace, {"GPU:0": [meter]}, (0, steps * STEP_NS), steps=steps)


def test_the_standard_error_of_a_row_is_that_of_its_steps() -> None:
    sums = np.array([session(seed).energy_j for seed in range(300)])
    stated = np.sqrt(np.mean([session(seed).error_j ** 2 for seed in range(100)], axis=0))
    np.testing.assert_allclose(stated, sums.std(axis=0, ddof=1), rtol=0.15)


def test_errors_of_rows_add_up_and_those_of_sessions_as_independent() -> None:
    one, other = session(1), session(2)
    both = added([one, other])
    np.testing.assert_allclose(both.error_j, np.hypot(one.error_j, other.error_j))
    assert rolled_up(one, "module").error_j.tolist() == pytest.approx([float(one.error_j.sum())])


def test_without_steps_no_error_is_stated() -> None:
    assert np.isnan(session(1, steps=1).error_j).all()


def run_of(folder: Path, footprint: TensorFootprint, steps: int = 12) -> RunAnatomy:
    with create_run(folder, kind="measure") as writer:
        writer.describe(tracing={"steps": steps, "sessions": [{"steps": steps}]})
    return RunAnatomy(open_run(folder), folder.name, footprint)


def test_a_run_against_its_like_has_no_significant_change(tmp_path: Path) -> None:
    false = 0
    for seed in range(30):
        runs = [run_of(tmp_path / f"{seed}{name}", session(2 * seed + at)) for at, name in enumerate("ab")]
        false += any(row.significant(1) for row in compare(runs, by="op").changes)
    assert false <= 5, "each table is wrong in at most one case of twenty"


def test_a_real_change_is_significant_and_alone(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "a", session(1)), run_of(tmp_path / "b", session(2, factor=1.3))]
    found = {row.name: row.significant(1) for row in compare(runs, by="op").changes}
    assert found.pop("net/op0") is True and not any(found.values())
