"""The same jobs as three versions of Slurm print them (tests/slurm_recording.py): every version means the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.clusters.slurm_nodes import SlurmNode, parse_nodes
from joulery.adapters.clusters.slurm_records import SlurmRecord, parse_jobs, parse_table
from joulery.adapters.clusters.tres import parse_gpus

RECORDED = {file.stem.partition("-")[2]: file for file in sorted(Path(__file__).with_name("recorded").glob("*.json"))}
NEWER = sorted(set(RECORDED) - {"22.05"})
REQUESTS = ("tres_per_node", "tres_per_job", "tres_per_task")


def recording(version: str) -> dict[str, Any]:
    return dict(json.loads(RECORDED[version].read_text()))


def jobs(version: str) -> dict[int, SlurmRecord]:
    return {record.id: record for record in parse_jobs(json.dumps(recording(version)))}


def comparable(record: SlurmRecord, *left_out: str) -> dict[str, Any]:
    """What is read of a job, GPUs as numbers: versions write ``gres:gpu:2``, ``gres/gpu:2`` or ``gres/gpu=2``."""
    said = dataclasses.asdict(record)
    said |= {name: parse_gpus(said[name]) for name in REQUESTS} | {"gpus": record.gpus, "held": record.held}
    return {name: value for name, value in said.items() if name not in left_out}


def test_there_are_recordings_of_three_versions() -> None:
    assert {version: recording(version)["version"].rpartition(".")[0] for version in RECORDED} == {
        version: version for version in ("22.05", "24.11", "26.05")
    }


@pytest.mark.parametrize("version", NEWER)
def test_newer_versions_mean_the_same_jobs(version: str) -> None:
    old, new = jobs("22.05"), jobs(version)
    assert old.keys() == new.keys() == set(range(1, 9))
    for job, record in new.items():
        ended = ("cpus",) if job == 8 else ()  # of a job that was cancelled while it waited 22.05 says no CPUs
        array = ("output",) if job == 4 else ()  # the file of an array's tasks has no name before they start
        assert comparable(record, *ended, *array) == comparable(old[job], *ended, *array), f"job {job}"


@pytest.mark.parametrize("version", RECORDED)
def test_what_each_job_is(version: str) -> None:
    found = jobs(version)
    assert [found[job].gpus for job in sorted(found)] == [2, 2, 1, 1, 2, 1, 2, 1]
    assert [found[job].gpu_type for job in (1, 2, 3)] == ["a100", "", "a100"]
    assert [found[job].state for job in (1, 2, 3, 8)] == ["RUNNING", "RUNNING", "PENDING", "CANCELLED"]
    assert (found[2].limit_min, found[2].features, found[2].nodes_used) == (30, "2080ti", "g2")
    assert found[2].output == "/work/train.sh-2.log"
    assert (found[3].licenses, found[3].reason in ("Licenses", "Resources", "None")) == ("tool:1", True)
    assert (found[4].array, found[4].array_tasks, found[4].array_limit, found[4].tasks_waiting) == (4, "1-5", 2, 5)
    assert found[5].held and found[5].tagged and found[5].admin_comment == "green:held rank 1 of 2"
    assert [(found[job].het, found[job].het_offset) for job in (6, 7)] == [(6, 0), (6, 1)]


@pytest.mark.parametrize("version", RECORDED)
def test_text_says_what_json_says(version: str) -> None:
    rows = {record.id: record for record in parse_table("\n".join(recording(version)["table"]))}
    both = ("id", "name", "user", "partition", "comment", "admin_comment", "batch", "requeue", "restarts", "gpus")
    found = jobs(version)
    for job in found.keys() & rows.keys() - {4}:
        assert [getattr(rows[job], name) for name in both] == [getattr(found[job], name) for name in both]
    assert rows.keys() >= {1, 2, 3, 5}


@pytest.mark.parametrize("version", RECORDED)
def test_nodes(version: str) -> None:
    nodes: tuple[SlurmNode, ...] = parse_nodes("\n".join(recording(version)["nodes"]))
    assert [(node.name, node.gpus, node.used, set(node.types)) for node in nodes] == [
        ("g1", 2, 2, {"a100"}),
        ("g2", 2, 2, {"2080ti"}),
    ]
    assert all(node.up and node.partitions == {"train"} for node in nodes)
    assert [node.free_cpus for node in nodes] == [3.0, 3.0]
