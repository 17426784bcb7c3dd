"""Ray Train: one process of each node measures for all workers of its job there, and the first node knows the sum."""

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_engine import NO_RAY

NO_TRAIN = "Ray Train needs ray[train] and torch"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=NO_RAY),
    pytest.mark.skipif(any(importlib.util.find_spec(one) is None for one in ("pandas", "torch")), reason=NO_TRAIN),
]


def train(config: dict[str, str]) -> None:
    """The loop of a worker; the first one writes what all know."""
    import json
    import os
    import warnings
    from pathlib import Path

    import ray.train
    import torch

    import joulery

    warnings.simplefilter("ignore", joulery.MeasureWarning)
    context = ray.train.get_context()
    with joulery.TrainingJobMeter(meters=["fake:50"], carbon="360 g/kWh") as energy:
        for _ in range(3):
            sum(range(1_000_000))
            energy.step()
        torch.distributed.barrier()  # all have joined
        figures = energy.metrics()
        charged = sorted(energy._board.pids())
    own = None if energy.footprint is None else energy.footprint.energy_j
    job = None if energy.job is None else energy.job.as_dict()
    found = {"own_j": own, "job": job, "charged": charged, "pid": os.getpid(), "node": context.get_node_rank()}
    gathered = [None] * context.get_world_size()
    torch.distributed.all_gather_object(gathered, {**found, "rank": context.get_world_rank(), "figures": figures})
    if context.get_world_rank() == 0:
        Path(config["found"]).write_text(json.dumps(gathered))


def run(folder: Path, nodes: int, workers: int) -> list[dict[str, Any]]:
    """What each worker of a job knows, by rank."""
    import ray
    import ray.train
    from ray.cluster_utils import Cluster
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    head = {"num_cpus": workers // nodes + 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=workers // nodes)
        ray.init(address=cluster.address, log_to_driver=False)
        TorchTrainer(
            train,
            train_loop_config={"found": str(folder / "found.json")},
            scaling_config=ScalingConfig(
                num_workers=workers, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"
            ),
            run_config=RunConfig(storage_path=str(folder)),
        ).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()
    found: list[dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_job_of_ray_train_on_two_nodes_is_counted_once():
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        found = run(Path(folder), nodes=2, workers=4)
    for node in (0, 1):
        workers = [one for one in found if one["node"] == node]
        measuring = [one for one in workers if one["own_j"] is not None]
        assert (len(workers), len(measuring)) == (2, 1)
        assert measuring[0]["charged"] == sorted(one["pid"] for one in workers)
    job = found[0]["job"]
    assert (job["nodes"], job["reported"], job["final"]) == (2, 2, True)
    assert job["energy_j"] == pytest.approx(sum(one["own_j"] or 0.0 for one in found))
    assert job["carbon_g"] == pytest.approx(job["energy_j"] * 1e-4)
