"""Export a plan to Triton: model repositories, and commands that launch Triton's processes with their shares."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from joulery.adapters.engines.remote.triton import TritonModel, TritonProcess, config_text, one_server_each, processes
from joulery.config.services import PythonModel, TorchExportModel, TorchScriptModel, TransformersModel
from joulery.config.site import Site
from joulery.domain.gpu.provisioning import PlannedGpu, PlannedInstance
from joulery.domain.serving.service import Slo
from joulery.policies.placement.standby import key_of, watched_instances
from joulery.runtime.serving.plans.plan_in_force import delay_s
from joulery.store.files import disk_errors

PORT = 8000
MPS, SHARED, ENDPOINTS = "launch-mps.sh", "launch-shared.sh", "endpoints.json"
_BACKENDS: Mapping[type, str] = {
    PythonModel: "python",
    TorchScriptModel: "pytorch",
    TorchExportModel: "python",
    TransformersModel: "python",
}
"""Triton's backends of models that are not ONNX files; its PyTorch backend runs TorchScript."""
_MPS_HEAD = """\
#!/bin/sh
# One Triton process an instance, each with its share of the SMs (NVIDIA MPS). Written by joulery plan --triton.
# The standbys come last: send them requests when their original violates its SLO (endpoints.json).
cd "$(dirname "$0")" || exit 1
trap 'trap - TERM; kill 0' INT TERM EXIT
echo get_server_list | nvidia-cuda-mps-control >/dev/null 2>&1 || nvidia-cuda-mps-control -d || exit 1
"""
_SHARED_HEAD = """\
#!/bin/sh
# One Triton process a GPU; its rate limiter keeps the shares. Written by joulery plan --triton, for GPUs without MPS.
cd "$(dirname "$0")" || exit 1
trap 'trap - TERM; kill 0' INT TERM EXIT
"""


@dataclass(frozen=True, slots=True)
class TritonFiles:
    """Files written for Triton.

    Attributes:
        folder: Folder of the files.
        models: Number of ``config.pbtxt`` files.
        processes: Number of processes of the launch script, standbys included.
    """

    folder: Path
    models: int
    processes: int


def write_triton(site: Site, gpus: Sequence[PlannedGpu], folder: Path, slos: Mapping[str, Slo]) -> TritonFiles:
    """Write everything Triton needs for a plan, but the models themselves.

    ``gpuN/NAME/config.pbtxt`` (the model's file belongs into ``gpuN/NAME/1/``), ``launch-mps.sh``,
    ``launch-shared.sh`` and ``endpoints.json``, which lists the addresses of each service and of its standbys.

    Args:
        site: The site, for the models of its services.
        gpus: The plan.
        folder: Folder to write to; created if necessary.
        slos: SLO by service.

    Raises:
        CapabilityError: A file cannot be written.
    """
    backends = _backends(site)
    models = [[_model(gpu, index, each, backends) for each in gpu.instances] for index, gpu in enumerate(gpus)]
    originals = processes(models, ".", PORT)
    standbys = _standbys(gpus, slos, originals)
    shared = one_server_each(models, ".", PORT)
    with disk_errors(folder):
        for index, mine in enumerate(models):
            for model in mine:
                place = folder / f"gpu{index}" / model.name
                (place / "1").mkdir(parents=True, exist_ok=True)
                (place / "config.pbtxt").write_text(config_text(model), encoding="utf-8")
        _script(folder / MPS, _MPS_HEAD, [*originals, *standbys.values()])
        _script(folder / SHARED, _SHARED_HEAD, shared)
        addresses = json.dumps(_endpoints(gpus, originals, standbys), indent=1) + "\n"
        (folder / ENDPOINTS).write_text(addresses, encoding="utf-8")
    return TritonFiles(folder, sum(map(len, models)), len(originals) + len(standbys))


def _backends(site: Site) -> dict[tuple[str, str], str]:
    """Triton's backend by service and variant, where the site names their models."""
    found: dict[tuple[str, str], str] = {}
    for service in site.services:
        for variant in () if service.family_config is None else service.family.variants:
            found[service.name, variant.name] = _BACKENDS.get(type(variant.model), "onnxruntime")
    return found


def _model(gpu: PlannedGpu, index: int, each: PlannedInstance, backends: Mapping[tuple[str, str], str]) -> TritonModel:
    """Triton model of one instance; it has the same name on every GPU, unless a GPU has two instances of a service."""
    several = Counter(other.workload for other in gpu.instances)[each.workload] > 1
    name = f"{each.workload}-{each.replica}" if several else each.workload
    backend = backends.get((each.workload, each.model), "")
    # Every process sees one GPU, which it calls 0.
    return TritonModel(name, each.batch, delay_s(each), min(1.0, each.share_ratio), backend, gpu=0)


def _standbys(
    gpus: Sequence[PlannedGpu], slos: Mapping[str, Slo], originals: Sequence[TritonProcess]
) -> dict[str, TritonProcess]:
    """The standby process of every instance that can have one, by instance."""
    found: dict[str, TritonProcess] = {}
    port = PORT + 3 * len(originals)
    for watched, original in zip(watched_instances(gpus, slos), originals, strict=True):
        if watched.standby_percent > watched.share_percent + 1e-9:
            share = min(1.0, round(watched.standby_percent / 100, 9))
            found[watched.key] = TritonProcess(
                original.repository, original.models, original.gpu, share, port + 3 * len(found)
            )
    return found


def _script(file: Path, head: str, started: Sequence[TritonProcess]) -> None:
    lines = [f"{_on_its_gpu(process)} &\n" for process in started]
    file.write_text(f"{head}{''.join(lines)}wait\n", encoding="utf-8")
    file.chmod(0o755)


def _on_its_gpu(process: TritonProcess) -> str:
    """The command, with the GPU of its repository visible."""
    number = process.repository.rpartition("gpu")[2]
    return process.command().replace("CUDA_VISIBLE_DEVICES=0", f"CUDA_VISIBLE_DEVICES={number}", 1)


def _endpoints(
    gpus: Sequence[PlannedGpu], originals: Sequence[TritonProcess], standbys: Mapping[str, TritonProcess]
) -> dict[str, list[dict[str, object]]]:
    """Addresses by service, as accepted by ``joulery serve --model SERVICE=ADDRESS``."""
    found: dict[str, list[dict[str, object]]] = {}
    instances = [(index, each) for index, gpu in enumerate(gpus) for each in gpu.instances]
    for (index, each), process in zip(instances, originals, strict=True):
        standby = standbys.get(key_of(each.workload, each.replica))
        standby_url = None if standby is None else f"http://127.0.0.1:{standby.port}/{standby.models[0]}"
        found.setdefault(each.workload, []).append(
            {
                "url": f"http://127.0.0.1:{process.port}/{process.models[0]}",
                "standby_url": standby_url,
                "shadow_url": standby_url,
                "gpu": index,
                "share_ratio": process.share_ratio,
                "batch": each.batch,
            }
        )
    return found
