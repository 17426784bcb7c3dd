"""The Slurm adapter against what Slurm's commands answer; tests/e2e has it against the real thing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.clusters.progress import Progress
from joulery.adapters.clusters.slurm import SlurmBackend, SlurmScope, open_slurm, resized
from joulery.adapters.clusters.slurm_commands import Done, command_runner
from joulery.adapters.clusters.slurm_records import HELD_TAG, has_reason, owner_comment, parse_jobs, with_reason
from joulery.domain.cluster import Hold, JobState, Order, Release, Split, Start, Stop
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError, DataError
from joulery.runtime.schedule.scheduler import release_all
from tests.adapters.clusters.fake_slurm import FakeSlurm


def backend(slurm: FakeSlurm, **scope: Any) -> SlurmBackend:
    return SlurmBackend(slurm, SlurmScope(**scope))


def test_gpus_of_the_nodes_that_are_up_and_a_note_on_the_others() -> None:
    slurm = FakeSlurm(
        nodes=[
            ("g1", "mixed", "gpu:fake:2"), ("g2", "idle*", "gpu:fake:2"), ("g3", "down", "gpu:fake:2"),
            ("g4", "allocated", "gpu:fake:2(S:0-1)"), ("g5", "draining", "gpu:fake:2"), ("c1", "idle", "(null)"),
            ("g6", "mixed-", "gpu:fake:2"), ("g7", "idle~", "gpu:fake:2"), ("g8", "idle^", "gpu:fake:2"),
            ("g9", "reserved", "gpu:fake:2"), ("ga", "mixed$", "gpu:fake:2"), ("gb", "idle@", "gpu:fake:2"),
        ]
    )  # fmt: skip
    seen = backend(slurm).snapshot()

    assert seen.slots == 8
    assert seen.notes[:3] == ("node g2 is idle*", "node g3 is down", "node g5 is draining")
    assert seen.notes[3:] == ("node g8 is idle^", "node g9 is reserved", "node ga is mixed$", "node gb is idle@")


def test_partitions_without_gpus_are_named_and_a_slurm_conf_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    notes = backend(FakeSlurm(nodes=[]), partitions=("nope", "gpu")).snapshot().notes
    assert notes == ("Slurm has no node with GPUs in nope, gpu: sinfo -N -O nodelist,partition,gres",)
    with pytest.raises(ConfigError, match=r"jobs\.slurm\.conf: is not a file"):
        command_runner(1.0, tmp_path / "slurm.conf")


def test_a_job_is_spread_as_before_while_every_node_is_down() -> None:
    slurm = FakeSlurm()
    slurm.submit(1)
    cluster = backend(slurm)
    cluster.snapshot()
    slurm.nodes = [("g1", "down", "gpu:2")]
    assert cluster.snapshot().slots == 0
    assert "NumNodes=1-1" in cluster.apply(Start(1, 2))


def test_a_node_in_two_partitions_counts_once() -> None:
    assert backend(FakeSlurm(nodes=[("g1", "idle", "gpu:2")] * 2)).snapshot().slots == 2


@pytest.mark.parametrize("as_json", [True, False])
def test_held_stopped_resized_and_started_under_one_number(as_json: bool) -> None:
    slurm = FakeSlurm(json=as_json)
    slurm.submit(1)
    cluster = backend(slurm)
    cluster.apply(Hold(1))
    (held,) = cluster.snapshot().jobs
    assert (held.held_by_us, held.state, held.exempt) == (True, JobState.WAITING, "")

    assert "NumNodes=2-2" in cluster.apply(Start(1, 4))
    (started,) = cluster.snapshot().jobs
    assert (started.held_by_us, started.shape) == (False, 4)
    slurm.jobs[1]["job_state"] = "RUNNING"
    cluster.apply(Stop(1))
    (stopped,) = cluster.snapshot().jobs
    assert (stopped.id, stopped.held_by_us, stopped.restarts, stopped.slots) == (1, True, 1, 0)
    cluster.apply(Start(1, 1))
    assert slurm.jobs[1]["tres_per_node"] == "gres:gpu:1"
    assert not any("StartTime" in word for command in slurm.commands for word in command), "nodes would refuse it"
    assert slurm.jobs[1]["comment"] == "joulery:min=1,max=4", "its owner's words are left alone"


def test_the_tag_is_set_before_the_hold_and_taken_off_after_the_release() -> None:
    slurm = FakeSlurm()
    slurm.submit(1)
    cluster = backend(slurm)
    cluster.apply(Hold(1))
    cluster.apply(Release(1))
    slurm.jobs[1]["job_state"] = "RUNNING"
    cluster.apply(Stop(1))

    said = [command[1:] for command in slurm.commands if command[0] == "scontrol"]
    assert said == [
        ("update", "JobId=1", f"AdminComment={HELD_TAG}"), ("hold", "1"),
        ("release", "1"), ("update", "JobId=1", "AdminComment="),
        ("update", "JobId=1", f"AdminComment={HELD_TAG}"), ("requeuehold", "1"),
    ]  # fmt: skip


def test_a_mark_that_a_killed_scheduler_left_without_its_hold_goes_with_the_holds() -> None:
    """An owner's own hold of such a job would be taken for joulery's, and released."""
    slurm = FakeSlurm()
    for number in (1, 2, 3):
        slurm.submit(number)
    slurm.jobs[1]["admin_comment"] = HELD_TAG
    slurm.jobs[2].update(admin_comment=HELD_TAG, job_state="RUNNING")
    cluster = backend(slurm)
    assert [(job.held_by_us, job.marked) for job in cluster.snapshot().jobs] == [
        (False, True), (False, True), (False, False),
    ]  # fmt: skip
    assert release_all(cluster) == [1, 2]
    assert [slurm.jobs[number]["admin_comment"] for number in (1, 2, 3)] == ["", "", ""]
    assert ("scontrol", "release", "2") not in slurm.commands, "Slurm refuses to release what runs"
    assert release_all(cluster) == []


def test_tasks_of_an_array_are_named_one_by_one_and_never_by_the_number_of_all() -> None:
    slurm = FakeSlurm()
    slurm.submit(7, array_job_id=7, array_task_id=None, array_task_string="3-6,9%4", array_max_tasks=4)
    slurm.submit(8, array_job_id=7, array_task_id=1, array_task_string="", job_state="RUNNING")
    cluster = backend(slurm)
    rest, task = cluster.snapshot().jobs
    assert (rest.id, rest.tasks, rest.most_tasks, rest.array) == (7, 5, 4, 7)
    assert (task.id, task.tasks, task.array, task.stoppable) == (8, 1, 7, True)
    cluster.apply(Hold(7))
    assert cluster.apply(Split(7, 2)) == "tasks 3,4 are jobs of their own, held"
    cluster.apply(Stop(8))
    said = [words[1:] for words in slurm.commands if words[0] == "scontrol" and words[1] in ("hold", "requeuehold")]
    assert said == [("hold", "7_[3-6,9]"), ("hold", "7_[3,4]"), ("requeuehold", "7_1")]
    seen = {job.id: (job.tasks, job.held_by_us) for job in cluster.snapshot().jobs}
    assert seen == {7: (3, True), 8: (1, True), 9: (1, True), 10: (1, True)}, seen
    cluster.apply(Start(9, 1))
    assert slurm.commands[-2] == ("scontrol", "release", "7_3")


def test_the_rank_that_joulery_set_is_no_part_of_slurms_own_priority() -> None:
    """A job that squeue showed as waiting began before sprio was asked: squeue's priority has our rank in it."""
    slurm = FakeSlurm()
    slurm.submit(1, priority=10_500, site_factor=10_000)
    slurm.submit(2, priority=10_500, site_factor=10_000)
    assert [job.priority for job in backend(slurm).snapshot().jobs] == [500.0, 500.0]

    def meanwhile(command: Any) -> Done:
        if command[0] == "sprio":
            slurm.jobs[1]["job_state"] = "RUNNING"
            slurm.jobs[2]["job_state"] = "RUNNING"
        return slurm(command)

    seen = SlurmBackend(meanwhile, SlurmScope()).snapshot().jobs
    assert [job.state for job in seen] == [JobState.WAITING] * 2
    assert all(math.isnan(job.priority) for job in seen)


def test_a_partition_of_a_higher_tier_is_above_any_priority_of_a_lower_one() -> None:
    slurm = FakeSlurm(partitions={"g1": "low", "g2": "urgent"}, tiers={"low": 1, "urgent": 10})
    slurm.submit(1, partition="low", priority=4_000_000_000)
    slurm.submit(2, partition="urgent", priority=1)
    slurm.submit(3, partition="low,urgent", priority=2)
    low, urgent, both = backend(slurm).snapshot().jobs
    assert low.priority == 4e9, "one tier alone changes nothing"
    assert both.priority - urgent.priority == 1.0 and urgent.priority - low.priority > 0


def test_without_multifactor_priority_the_priority_that_squeue_prints_counts() -> None:
    slurm = FakeSlurm()
    slurm.submit(1, priority=7)
    refused = Done(1, "", "You are not running a supported priority plugin\n(priority/basic).")
    (job,) = SlurmBackend(lambda words: refused if words[0] == "sprio" else slurm(words), SlurmScope()).snapshot().jobs
    assert job.priority == 7.0


def test_components_of_a_heterogeneous_job_are_one_job_named_by_the_first() -> None:
    slurm = FakeSlurm(nodes=[("a1", "idle", "gpu:2"), ("b1", "idle", "gpu:2")], partitions={"a1": "a", "b1": "b"})
    slurm.submit(4, het_job_id=4, het_job_offset=0, partition="a", comment="first", state_reason="Resources")
    slurm.submit(5, het_job_id=4, het_job_offset=1, partition="b", tres_per_node="gres:gpu:2", comment="second")
    slurm.rights = "operator"
    cluster = backend(slurm)
    (job,) = cluster.snapshot().jobs
    assert (job.id, job.shape, job.min_slots, job.max_slots, job.parts) == (4, 3, 3, 3, (1, 2))
    assert not job.judged and job.pool == "" and job.limits >= {"partition a", "partition b"}
    cluster.apply(Hold(4))
    assert ("scontrol", "hold", "4") in slurm.commands
    assert [slurm.jobs[n]["comment"] for n in (4, 5)] == ["first joulery:held", "second joulery:held"]
    slurm.jobs[5].update(priority=0)  # as Slurm holds them together
    assert cluster.snapshot().jobs[0].held_by_us
    cluster.apply(Start(4, 3))
    assert [slurm.jobs[n]["comment"] for n in (4, 5)] == ["first", "second"]


@pytest.mark.parametrize("as_json", [True, False])
def test_held_jobs_say_in_their_comment_why_they_wait_and_only_they_do(as_json: bool) -> None:
    slurm = FakeSlurm(json=as_json)
    for number in range(1, 41):
        slurm.submit(number, comment="mine")
    cluster = backend(slurm)
    cluster.snapshot()
    for number in range(1, 31):
        cluster.apply(Hold(number))
    texts = {number: f"rank {number}: {100 * 'long '}" for number in range(1, 51)}
    for written in (16, 30, 30):
        cluster.snapshot()
        assert cluster.explain(texts) == ""
        said = [number for number in slurm.jobs if "rank" in slurm.jobs[number]["admin_comment"]]
        assert said == list(range(1, written + 1))
    count = len(slurm.commands)
    cluster.snapshot()
    cluster.explain(texts)
    assert not any("update" in words for words in slurm.commands[count:]), "what is there is not written again"
    assert all(job.held_by_us for job in cluster.snapshot().jobs[:30]), "the mark is still one"
    assert release_all(cluster) == list(range(1, 31))
    assert {job["admin_comment"] for job in slurm.jobs.values()} == {""}
    assert {job["comment"] for job in slurm.jobs.values()} == {"mine"}


@pytest.mark.parametrize("let_go", [Start(1, 2), Start(1, 3), Release(1)], ids=str)
def test_a_job_that_was_released_since_the_last_look_is_not_marked_again(let_go: Start | Release) -> None:
    slurm = FakeSlurm()
    slurm.submit(1, tres_per_node="gres:gpu:2", comment="joulery:min=1,max=4")
    cluster = backend(slurm)
    cluster.snapshot()
    cluster.apply(Hold(1))
    cluster.snapshot()
    cluster.apply(let_go)
    assert cluster.explain({1: "rank 1"}) == ""
    assert slurm.jobs[1]["admin_comment"] == ""
    assert not cluster.snapshot().jobs[0].held_by_us


def test_without_the_right_to_admin_comment_this_is_said_once_and_the_owners_comment_is_left() -> None:
    slurm = FakeSlurm(rights="operator")
    slurm.submit(1, comment="mine")
    cluster = backend(slurm)
    cluster.snapshot()
    cluster.apply(Hold(1))
    cluster.snapshot()
    assert "only an administrator" in cluster.explain({1: "rank 1"})
    assert cluster.explain({1: "rank 1"}) == ""
    assert slurm.jobs[1]["comment"] == "mine joulery:held"


@pytest.mark.parametrize("rights", ["admin", "operator"])
@pytest.mark.parametrize("as_json", [True, False])
def test_an_opt_in_writes_the_reason_behind_the_owners_words_and_takes_it_back(rights: str, as_json: bool) -> None:
    slurm = FakeSlurm(rights=rights, json=as_json)
    mine = {1: "joulery:min=1,max=4", 2: "", 3: "a  [note] of mine"}
    for number, comment in mine.items():
        slurm.submit(number, comment=comment)
    cluster = backend(slurm, reason_in_comment=True)
    cluster.snapshot()
    for number in mine:
        cluster.apply(Hold(number))
    for at in (1, 2):
        cluster.snapshot()
        assert cluster.explain(dict.fromkeys((1, 2, 3), f"rank {at} [of 3]")) == ""
        mark = "" if rights == "admin" else "joulery:held "
        shown = [slurm.jobs[number]["comment"] for number in mine]
        assert shown == [f"{own} {mark}[joulery: rank {at} (of 3)]".lstrip() for own in mine.values()]
    count = len(slurm.commands)
    jobs = cluster.snapshot().jobs
    assert [(job.held_by_us, job.max_slots) for job in jobs] == [(True, 4), (True, 1), (True, 1)]
    cluster.explain(dict.fromkeys(mine, "rank 2 [of 3]"))
    assert not any("update" in words for words in slurm.commands[count:]), "what is there is not written again"
    cluster.apply(Start(1, 1))
    assert release_all(cluster) == [2, 3]
    assert {number: job["comment"] for number, job in slurm.jobs.items()} == mine
    assert {job["admin_comment"] for job in slurm.jobs.values()} == {""}


def test_what_its_owner_wrote_since_the_last_look_stays_and_a_long_text_gets_none_of_ours() -> None:
    slurm = FakeSlurm()
    for number, comment in ((1, "old"), (2, "x" * 701)):
        slurm.submit(number, comment=comment)
    cluster = backend(slurm, reason_in_comment=True)
    cluster.snapshot()
    for number in (1, 2):
        cluster.apply(Hold(number))
    cluster.snapshot()
    slurm.jobs[1]["comment"] = "new"
    cluster.explain({1: "rank 1", 2: "rank 2"})
    assert slurm.jobs[1]["comment"] == "new [joulery: rank 1]"
    assert slurm.jobs[2]["comment"] == "x" * 701 and slurm.jobs[2]["admin_comment"] == "green:held rank 2"


@given(st.text(alphabet="ab []:joulery=,", max_size=60), st.text(max_size=300), st.booleans())
def test_the_owners_words_are_what_is_left(own: str, text: str, held: bool) -> None:
    own = owner_comment(own)  # joulery's own words are taken out of an owner's text
    marked = f"{own} joulery:held".lstrip() if held else own
    shown = with_reason(marked, text)
    assert owner_comment(shown) == own and has_reason(shown) and len(shown) <= len(marked) + 253
    assert with_reason(shown, text) == shown, "written once"


def test_an_operator_marks_jobs_behind_their_owners_words() -> None:
    slurm = FakeSlurm(rights="operator")
    for number, comment in ((1, "joulery:min=1,max=4"), (2, "")):
        slurm.submit(number, comment=comment)
    cluster = backend(slurm)
    for number in (1, 2):
        cluster.apply(Hold(number))
    assert [slurm.jobs[n]["comment"] for n in (1, 2)] == ["joulery:min=1,max=4 joulery:held", "joulery:held"]
    assert sum("AdminComment" in word for words in slurm.commands for word in words) == 1, (
        "refused once, never tried again"
    )
    assert [(job.held_by_us, job.max_slots) for job in cluster.snapshot().jobs] == [(True, 4), (True, 1)]
    assert release_all(cluster) == [1, 2]
    assert [slurm.jobs[n]["comment"] for n in (1, 2)] == ["joulery:min=1,max=4", ""]


def test_a_user_without_rights_schedules_his_own_jobs_and_is_informed_once() -> None:
    slurm = FakeSlurm(rights="user")
    slurm.submit(1)
    slurm.submit(2, user_name="bob")
    cluster = backend(slurm, user="ada")
    with pytest.raises(CapabilityError) as caught:
        cluster.apply(Order((1, 2)))
    assert "Operator" in str(caught.value.hint) and not caught.value.grant, "he goes on with his own"
    assert cluster.apply(Order((1, 2))).startswith("not ranked")
    snapshot = cluster.snapshot()
    assert [bool(job.exempt) for job in snapshot.jobs] == [False, True] and "not a Slurm operator" in snapshot.notes[-1]
    cluster.apply(Hold(1))
    assert cluster.snapshot().jobs[0].held_by_us


def test_a_job_that_began_before_its_hold_came_is_seen_as_held_until_it_is_over() -> None:
    slurm = FakeSlurm()
    slurm.submit(1, job_state="RUNNING")
    cluster = backend(slurm)
    cluster.apply(Hold(1))
    (held,) = cluster.snapshot().jobs
    assert (held.state, held.held_by_us, held.slots) == (JobState.RUNNING, True, 1)
    assert release_all(cluster) == [1]
    (released,) = cluster.snapshot().jobs
    assert not released.held_by_us and slurm.jobs[1]["priority"] and not slurm.jobs[1]["admin_comment"]
    cluster.apply(Hold(1))
    slurm.jobs[1]["job_state"] = "COMPLETED"
    assert release_all(cluster) == []


def test_a_job_of_the_right_size_is_only_released() -> None:
    slurm = FakeSlurm()
    slurm.submit(1)
    assert backend(slurm).apply(Start(1, 1)) == "as it is"
    assert not any("NumTasks" in word for command in slurm.commands for word in command)


def test_a_job_that_waits_unheld_is_started_without_a_command() -> None:
    slurm = FakeSlurm()
    slurm.submit(1)
    slurm.submit(2, comment="joulery:min=1,max=4")
    slurm.submit(3, admin_comment="green:held")
    cluster = backend(slurm)
    cluster.snapshot()
    count = len(slurm.commands)
    assert cluster.apply(Start(1, 1)) == "released already"
    assert len(slurm.commands) == count
    assert "NumTasks=2" in cluster.apply(Start(2, 2)), "another size"
    cluster.apply(Start(3, 1))
    assert not slurm.jobs[3]["admin_comment"], "a mark is removed"


def test_a_job_that_was_held_since_the_last_look_is_released() -> None:
    slurm = FakeSlurm()
    slurm.submit(1)
    cluster = backend(slurm)
    cluster.snapshot()
    cluster.apply(Hold(1))
    assert cluster.apply(Start(1, 1)) == "as it is"
    assert not cluster.snapshot().jobs[0].held_by_us


def test_a_job_that_runs_or_ended_cannot_be_started() -> None:
    slurm = FakeSlurm()
    slurm.submit(1, job_state="RUNNING")
    with pytest.raises(ActuationError, match="Slurm has it RUNNING"):
        backend(slurm).apply(Start(1, 2))
    slurm.jobs[1]["job_state"] = "COMPLETING"
    with pytest.raises(ActuationError, match="Slurm has it COMPLETING"):
        backend(slurm).apply(Start(1, 2))
    with pytest.raises(ActuationError, match="no job 9"):
        backend(slurm).apply(Start(9, 2))


def test_without_json_a_job_that_is_gone_is_no_fault_of_squeue() -> None:
    slurm = FakeSlurm(json=False)
    with pytest.raises(ActuationError, match="no job 9: it ended meanwhile"):
        backend(slurm).apply(Start(9, 1))


def test_a_change_of_a_job_that_ended_meanwhile_is_no_fault() -> None:
    slurm = FakeSlurm()
    slurm.submit(1, job_state="COMPLETED")
    for action in (Stop(1), Hold(1), Release(1)):
        assert backend(slurm).apply(action) == "it ended meanwhile"
    with pytest.raises(ActuationError, match="no job 9"):
        backend(slurm).apply(Stop(9))


def test_the_first_in_the_order_gets_the_largest_site_factor() -> None:
    slurm = FakeSlurm()
    for number in (1, 2, 3):
        slurm.submit(number)
    remark = backend(slurm).apply(Order((3, 1, 9, 2)))

    assert [slurm.jobs[number]["site_factor"] for number in (3, 1, 2)] == [4000, 3000, 1000]
    assert remark.startswith("3 ranked; refused: job 9: Invalid job id")


def test_a_long_order_takes_few_calls_and_ends_in_groups() -> None:
    slurm = FakeSlurm()
    order = list(range(1000, 0, -1))
    for number in order:
        if number != 7:
            slurm.submit(number)
    remark = backend(slurm).apply(Order(tuple(order)))

    ranks = [slurm.jobs[number]["site_factor"] for number in order if number != 7]
    assert len([call for call in slurm.commands if "update" in call]) == 16 + 6
    assert ranks == sorted(ranks, reverse=True) and min(ranks) > 0, "no job overtakes another"
    assert len(set(ranks[:16])) == 16, "and the first go in order"
    assert remark == "999 ranked; refused: Invalid job id specified for job 7"


def test_a_controller_that_is_away_says_so() -> None:
    slurm = FakeSlurm(away=True)
    for deed in (lambda: backend(slurm).snapshot(), lambda: backend(slurm).apply(Hold(1)),
                 lambda: backend(slurm).apply(Order((1,))), lambda: backend(slurm).apply(Start(1, 1))):  # fmt: skip
        with pytest.raises(CapabilityError, match="controller does not answer"):
            deed()


@pytest.mark.parametrize(
    "words",
    [
        "Unable to contact slurm controller (connect failure)",
        "Connection refused",
        "Zero Bytes were transmitted or received",
        "Socket timed out on send/recv operation",
    ],
)
def test_every_slurm_message_of_no_answer_is_no_refusal(words: str) -> None:
    def away(command: Any) -> Done:
        return Done(1, "", f"scontrol: error: {words}")

    for action in (Hold(1), Release(1), Stop(1), Order((1,))):
        with pytest.raises(CapabilityError, match="does not answer"):
            SlurmBackend(away, SlurmScope()).apply(action)


def test_json_that_failed_once_is_not_given_up() -> None:
    slurm = FakeSlurm()
    slurm.submit(1)
    cluster = backend(slurm)
    cluster.snapshot()
    slurm.json = False
    with pytest.raises(CapabilityError, match="squeue failed"):
        cluster.snapshot()
    slurm.json = True

    assert len(cluster.snapshot().jobs) == 1
    assert not any("-O" in command for command in slurm.commands if command[0] == "squeue")


def test_missing_rights_come_with_the_line_that_grants_them() -> None:
    slurm = FakeSlurm(forbidden=True)
    slurm.submit(1)
    with pytest.raises(CapabilityError) as caught:
        backend(slurm).apply(Hold(1))

    assert caught.value.grant is not None
    assert caught.value.grant.startswith("sacctmgr")


def test_nonsense_from_slurm_is_one_clear_error() -> None:
    def nonsense(command: Any) -> Any:
        done = FakeSlurm()(command)
        return done if command[0] == "sinfo" else type(done)(0, "{}", "")

    with pytest.raises(DataError, match="squeue --json"):
        SlurmBackend(nonsense, SlurmScope()).snapshot()


def test_a_job_without_a_state_is_one_clear_error() -> None:
    slurm = FakeSlurm()
    slurm.jobs[1] = {"job_id": 1, "job_state": [], "cpus": 1, "node_count": 1}
    with pytest.raises(DataError, match="squeue --json"):
        backend(slurm).snapshot()


def test_names_that_are_no_utf8_and_commands_that_cannot_start_stop_no_job() -> None:
    run = command_runner(30.0)
    assert run(("printf", r"caf\351")).out == "caf\ufffd"
    with pytest.raises(CapabilityError, match="cannot be started: No such file"):
        run(("/nowhere/squeue",))
    with pytest.raises(CapabilityError, match=r"took longer than 0\.1 s"):
        command_runner(0.1)(("sleep", "30"))


def test_progress_is_read_from_a_file_a_job(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.submit(1)
    (tmp_path / "1").write_text("epoch 1/4\n")

    assert backend(slurm, progress=Progress(tmp_path)).snapshot().jobs[0].progress_ratio == 0.25


def test_where_owners_have_no_say_jobs_keep_their_size() -> None:
    slurm = FakeSlurm()
    slurm.submit(1)
    (job,) = backend(slurm, user_range=False).snapshot().jobs

    assert (job.min_slots, job.max_slots) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "gpus", "expected"),
    [
        ({}, 2, ("NumTasks=2", "NumCPUs=2", "NumNodes=1-1", "TresPerNode=gres:gpu:2")),
        ({}, 3, ("NumTasks=3", "NumCPUs=3", "NumNodes=3-3", "TresPerNode=gres:gpu:1")),
        ({}, 4, ("NumTasks=4", "NumCPUs=4", "NumNodes=2-2", "TresPerNode=gres:gpu:2")),
        (
            {"tres_per_node": "gres:gpu:a100:2", "tasks": 4, "cpus": 16},
            1,
            ("NumTasks=2", "NumCPUs=8", "NumNodes=1-1", "TresPerNode=gres:gpu:a100:1"),
        ),
        (
            {"tres_per_node": "", "tres_per_job": "gres:gpu:1", "cpus": 2},
            2,
            ("TresPerJob=gres:gpu:2", "NumTasks=2", "NumCPUs=4"),
        ),
        (
            {"tres_per_node": "gres:gpu:2", "node_count": 2, "tasks": 1, "cpus": 8},
            2,
            ("NumTasks=2", "NumCPUs=16", "NumNodes=1-1", "TresPerNode=gres:gpu:2"),
        ),
    ],
)
def test_the_words_that_resize(changes: dict[str, Any], gpus: int, expected: tuple[str, ...]) -> None:
    slurm = FakeSlurm()
    slurm.submit(1, **changes)
    (record,) = parse_jobs(json.dumps({"jobs": list(slurm.jobs.values())}))
    assert resized(record, gpus, 2) == ("scontrol", "update", "JobId=1", *expected)


def test_gpus_that_hang_on_tasks_are_not_resized() -> None:
    slurm = FakeSlurm()
    slurm.submit(1, tres_per_node="", tres_per_task="gres:gpu:1")
    with pytest.raises(ActuationError, match="gpus-per-task"):
        backend(slurm).apply(Start(1, 2))


def test_gpus_of_sockets_count_and_stay_as_they_are() -> None:
    slurm = FakeSlurm()
    slurm.submit(1, tres_per_node="", tres_per_socket="gres:gpu:a100:1", sockets_per_node=2, node_count=3)
    (record,) = parse_jobs(json.dumps({"jobs": list(slurm.jobs.values())}))
    assert (record.gpus, record.gpu_type) == (6, "a100")
    with pytest.raises(ActuationError, match="gpus-per-socket"):
        resized(record, 3, 2)
    slurm.jobs[1].update(tres_per_socket="gres:gpu:1", node_count=1)
    (job,) = backend(slurm).snapshot().jobs
    assert (job.shape, job.min_slots, job.max_slots) == (2, 2, 2)


def test_without_slurm_on_the_path_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CapabilityError, match="squeue is not on PATH"):
        open_slurm()
