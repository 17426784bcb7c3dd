"""Ray Train: one worker of a node measures for all workers of its job there, and for nothing else of Ray's."""

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_engine import NO_RAY

NO_TRAIN = "Ray Train is not installed: pip install 'ray[train]' torch"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
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


def run(folder: Path, raylets: int, workers: int) -> list[dict[str, Any]]:
    """What each worker of a job knows, by rank."""
    import ray
    import ray.train
    from ray.cluster_utils import Cluster
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    cpus = workers // raylets
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus + 1, "include_dashboard": False})
    try:
        for _ in range(raylets - 1):
            cluster.add_node(num_cpus=cpus)
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
def test_a_job_of_ray_train_is_counted_once():
    """Two raylets on one machine are one node to Ray Train, so one of their four workers measures for all."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        found = run(Path(folder), raylets=2, workers=4)
    assert {one["node"] for one in found} == {0}
    (measuring,) = (one for one in found if one["own_j"] is not None)
    assert measuring["rank"] == 0 and measuring["own_j"] > 0
    assert measuring["charged"] == sorted(one["pid"] for one in found)  # the workers of this job, not all of Ray's
    assert measuring["figures"]["joulery/step_energy_j"] > 0
    assert all(one["figures"] == {} for one in found if one is not measuring)
    assert all(one["job"] is None for one in found)  # there is one node
