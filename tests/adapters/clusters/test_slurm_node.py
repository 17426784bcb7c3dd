"""Jobs of a node, found in a made-up /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from joulery.adapters.clusters.slurm_node import gpu_ids, job_of, node_placements
from joulery.domain.cluster import Placement


def process(proc: Path, pid: int, parent: int, **variables: str) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in variables.items()))
    (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1 0")


def test_jobs_are_distinguished_and_only_their_top_processes_count(tmp_path: Path) -> None:
    process(tmp_path, 1, 0, HOME="/")
    process(tmp_path, 10, 1, SLURM_JOB_ID="7", SLURM_JOB_GPUS="0,2-3", CUDA_VISIBLE_DEVICES="0,1,2")
    process(tmp_path, 11, 10, SLURM_JOB_ID="7", SLURM_JOB_GPUS="0,2-3")
    process(tmp_path, 12, 1, SLURM_JOB_ID="7", SLURM_JOB_GPUS="0,2-3")
    process(tmp_path, 20, 1, SLURM_JOB_ID="8", CUDA_VISIBLE_DEVICES="1")
    process(tmp_path, 30, 10, SLURM_JOB_ID="9")
    (tmp_path / "self").mkdir()
    (tmp_path / "40").mkdir()

    assert node_placements(tmp_path) == (
        Placement(7, (10, 12), 3, (0, 2, 3)),
        Placement(8, (20,), 1, (1,)),
        Placement(9, (30,), 1, ()),
    )


def test_what_a_prolog_wrote_counts_first(tmp_path: Path) -> None:
    proc, prolog = tmp_path / "proc", tmp_path / "prolog"
    proc.mkdir()
    prolog.mkdir()
    (prolog / "7").write_text("3\n")
    process(proc, 10, 1, SLURM_JOB_ID="7", CUDA_VISIBLE_DEVICES="0")
    process(proc, 20, 1, SLURM_JOB_ID="8", CUDA_VISIBLE_DEVICES="0")

    assert [found.gpus for found in node_placements(proc, prolog)] == [(3,), (0,)]


def test_nodes_that_share_a_machine_see_their_own(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, SLURM_JOB_ID="7", SLURMD_NODENAME="g1")
    process(tmp_path, 20, 1, SLURM_JOB_ID="8", SLURMD_NODENAME="g2")

    assert [found.job for found in node_placements(tmp_path, node="g2")] == [8]


def test_a_job_on_several_nodes_knows_them_where_slurm_names_them_all(tmp_path: Path) -> None:
    many = {"SLURM_JOB_NUM_NODES": "3", "SLURMD_NODENAME": "g2"}
    process(tmp_path, 10, 1, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="g[1-2],h7", **many)
    process(tmp_path, 20, 1, SLURM_JOB_ID="8", SLURM_JOB_NODELIST="g[1-2]", **many)
    process(tmp_path, 30, 1, SLURM_JOB_ID="9", SLURM_JOB_NODELIST="h[1-3]", **many)
    process(tmp_path, 40, 1, SLURM_JOB_ID="11", SLURM_JOB_NODELIST="g2", SLURMD_NODENAME="g2")

    found = [(one.nodes, one.hosts, one.host) for one in node_placements(tmp_path)]
    assert found == [(3, ("g1", "g2", "h7"), "g2"), (3, (), ""), (3, (), ""), (1, (), "")]


@pytest.mark.parametrize(
    ("text", "expected"), [("0", (0,)), ("0,2-3\n", (0, 2, 3)), ("", ()), ("GPU-3f2a", ()), (" 1 , 0", (0, 1))]
)
def test_numbers_of_boards(text: str, expected: tuple[int, ...]) -> None:
    assert gpu_ids(text) == expected


def test_jobs_are_distinguished_by_who_started_what_and_on_how_many_nodes(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, SLURM_JOB_ID="7", SLURM_JOB_USER="ann", SLURM_JOB_NAME="train", SLURM_JOB_NUM_NODES="2")
    process(tmp_path, 20, 1, SLURM_JOB_ID="8", SLURM_JOB_NUM_NODES="many")
    first, second = node_placements(tmp_path)
    assert (first.kind, first.nodes) == ("ann/train", 2)
    assert (second.kind, second.nodes) == ("", 1)


def test_clusters_that_share_a_node_name_see_their_own(tmp_path: Path) -> None:
    for pid, cluster in ((10, "east"), (20, "west")):
        process(tmp_path, pid, 1, SLURM_JOB_ID="7", SLURMD_NODENAME="g1", SLURM_CLUSTER_NAME=cluster)
    process(tmp_path, 30, 1, SLURM_JOB_ID="9")

    found = node_placements(tmp_path, node="g1", cluster="West")
    assert [(one.job, one.pids) for one in found] == [(7, (20,)), (9, (30,))], "one that shows no name is everybody's"
    assert [job_of(pid, tmp_path, "east") for pid in (10, 20, 30)] == [7, 0, 9]
