"""The runs of a job's nodes in one folder: found, waited for, and missing ones said."""

import pytest

from joulery.app.runs.job_runs import missing_nodes, runs_in, wait_for_nodes
from joulery.store.run.directory import create_run


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def run(folder, node, nodes=2):
    return create_run(folder / f"node-{node}", kind="measure", details={"job": {"node": node, "nodes": nodes}})


def test_a_folder_stands_for_the_runs_in_it(tmp_path):
    for node in (10, 2, 0):
        run(tmp_path, node).close()
    (tmp_path / "other").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert [one.name for one in runs_in(tmp_path)] == ["node-0", "node-2", "node-10"]
    assert runs_in(tmp_path / "node-2") == (tmp_path / "node-2",)
    assert runs_in(tmp_path / "other") == (tmp_path / "other",)  # the reader says that it holds no run
    assert runs_in(tmp_path / "absent") == (tmp_path / "absent",)


def test_the_first_node_waits_for_the_others_but_not_forever(tmp_path):
    clock = Clock()
    first, second = run(tmp_path, 0), run(tmp_path, 1)
    first.close()
    assert wait_for_nodes(tmp_path, 2, 10.0, clock, clock.sleep) == 1
    assert clock.now_s == pytest.approx(10.0, abs=0.2)
    (tmp_path / "node-1" / "manifest.json").rename(tmp_path / "away")
    assert wait_for_nodes(tmp_path, 2, 1.0, clock, clock.sleep) == 1
    (tmp_path / "away").rename(tmp_path / "node-1" / "manifest.json")
    second.close()
    before_s = clock.now_s
    assert wait_for_nodes(tmp_path, 2, 10.0, clock, clock.sleep) == 2
    assert clock.now_s == before_s


def test_missing_nodes_are_said():
    def of(node, nodes=3, name=""):
        return {"job": {"name": name, "node": node, "nodes": nodes}}

    assert missing_nodes([of(0), of(1), of(2), {}]) == ()
    assert missing_nodes([of(0), of(2)]) == ("2 of 3 nodes of a job are here: the sum is of these",)
    assert missing_nodes([of(1, 2, "slurm-1.0")]) == (
        "node 1 of the job slurm-1.0 on 2 nodes: the figures are of this node",
    )
    assert missing_nodes([{"job": "?"}, {"job": {"nodes": 2}}]) == ()
