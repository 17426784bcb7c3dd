"""Logs of joulery 0.1: policies of that version, decided again by this one."""

import json
from pathlib import Path

import pytest

from joulery.app.runs.replay import decide_again
from joulery.domain.renames import RenamedWarning
from joulery.store.run.directory import create_run, open_run
from joulery.store.run.timeline import read_decisions

LOG = [json.loads(line) for line in Path(__file__).with_name("log_0_1.jsonl").read_text().splitlines()]
"""Written by joulery 0.1: a predictive policy, a policy of trials, and the policy of standbys."""


def altered(kind: str, **changes: object) -> list[dict]:
    """The log with one decision changed."""
    log = json.loads(json.dumps(LOG))
    decision = next(d for entry in log for d in entry.get("decisions", ()) if d["kind"] == kind)
    decision.update(changes)
    return log


def test_every_policy_of_the_old_version_decides_the_same_again() -> None:
    assert [entry["name"] for entry in LOG if entry["kind"] == "policy"] == ["variants", "trials", "shadow"]
    with pytest.warns(RenamedWarning, match="min_requests"):
        replayed = decide_again(LOG)
    assert (replayed.steps, replayed.decisions, replayed.differences) == (20, 11, ())


@pytest.mark.parametrize("kind", ["set_layout", "try_layout", "activate_shadow"])
def test_another_decision_in_an_old_log_is_a_difference(kind: str) -> None:
    with pytest.warns(RenamedWarning):
        assert len(decide_again(altered(kind, target="another")).differences) == 1
        assert not decide_again(altered(kind, reason="worded otherwise")).differences


def test_a_policy_of_this_version_is_compared_with_its_reasons() -> None:
    """The standby policy by its present names: a changed sentence is a difference."""
    policy, *steps = json.loads(json.dumps(LOG[[e.get("name") for e in LOG].index("shadow") :]))
    policy["name"] = "standby"
    policy["policy"]["min_requests"] = policy["policy"].pop("fewest")
    for one in policy["policy"]["instances"]:
        one["standby_percent"] = one.pop("shadow_percent")
    assert len(decide_again([policy, *steps]).differences) == 1, "the old sentence names a shadow"


def test_a_report_names_old_decisions_by_their_new_words(tmp_path: Path) -> None:
    with create_run(tmp_path / "run", kind="up") as writer:
        for kind in ("activate_shadow", "promise_broken", "run_plan"):
            decision = {"kind": kind, "target": "W1/0", "value": 1, "policy": "shadow", "reason": "late", "cause": ""}
            writer.log("decision", t_s=1.0, decision=decision, outcome="applied", detail="")
    with pytest.warns(RenamedWarning) as found:
        records = read_decisions(open_run(tmp_path / "run"))
    assert [record.decision.kind for record in records] == ["activate_standby", "slo_violated", "run_plan"]
    assert {record.decision.policy for record in records} == {"standby"}
    assert len(found) == 2, "one line a word"
