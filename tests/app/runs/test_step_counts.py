"""Joules of a step, a sample and a token of traced runs."""

from types import SimpleNamespace

import pytest

from joulery.app.runs.anatomies import step_counts
from joulery.ui.cli.report_anatomy import step_line


def run(attributed_j, *sessions):
    kept = {"step_counts": {"training": 20, "evaluation": 4, "recorded": 6, "share_of_run_ratio": 0.25}}
    return SimpleNamespace(
        run=SimpleNamespace(manifest={"tracing": {**kept, "sessions": list(sessions)}}),
        footprint=SimpleNamespace(attributed_j=attributed_j),
    )


def session(process, steps, samples=None, tokens=None):
    return {"process": process, "steps": steps, "samples": samples, "tokens": tokens}


def test_ranks_share_steps_and_each_has_samples_and_tokens_of_its_own() -> None:
    counts = step_counts([run(120.0, session(1, 3, 24, 3072), session(2, 3, 16, 2048))])
    assert counts["samples"] == 40 and counts["tokens"] == 5120
    assert counts["energy_j_per_step"] == pytest.approx(40.0)
    assert counts["energy_j_per_sample"] == pytest.approx(3.0)
    assert counts["energy_j_per_token"] == pytest.approx(120 / 5120)
    assert "40.0 J a step, 3.00 J a sample, 23.4 mJ a token" in step_line(counts)


@pytest.mark.parametrize("unknown", [session(2, 3), {"process": 2, "steps": 3}])
def test_what_one_session_does_not_know_is_unknown_of_the_run(unknown) -> None:
    counts = step_counts([run(120.0, session(1, 3, 24, None), unknown)])
    assert counts["samples"] is counts["tokens"] is None
    assert counts["energy_j_per_sample"] is counts["energy_j_per_token"] is None
    assert step_line(counts).endswith("40.0 J a step\n")


def test_a_run_without_a_recorded_step_has_none_of_them() -> None:
    counts = step_counts([run(0.0)])
    assert [counts[f"energy_j_per_{one}"] for one in ("step", "sample", "token")] == [None, None, None]
