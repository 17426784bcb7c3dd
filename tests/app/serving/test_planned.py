"""A plan read back, and what of it does not fit the site."""

import json
from pathlib import Path

import pytest

from joulery.adapters.devices.nvidia_mig import NvidiaMig
from joulery.adapters.devices.places import GpuPlaces
from joulery.app.planning.shares import share_request
from joulery.app.serving.planned import _check_partitions, _require_no_slices, models_of
from joulery.app.wiring.gpus import LocalGpus
from joulery.config import load
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.service import Slo
from joulery.policies.placement.provisioning.planner import provision
from joulery.runtime.serving.plans.plan_in_force import PlanInForce
from joulery.store.plan_documents import document_of
from joulery.store.plans import PlanFile
from tests.fakes.nvml import NvmlFake, gpu
from tests.runtime.plan_files import planned_site, service


@pytest.fixture
def site(tmp_path):
    return load(planned_site(tmp_path, service("steady"), service("wide", model="heavy", rate=5)))


def planned(site):
    request = share_request(site)
    return provision("best", request.workloads, request.types, request.rules)


def test_a_plan_that_was_written_is_read_back_as_it_was(site):
    plan = planned(site)
    assert PlanFile(Path("plan.json"), json.loads(json.dumps(document_of(plan)))).shares() == plan.gpus


@pytest.mark.parametrize("wrong", [{}, [], {"gpus": [{}]}, {"gpus": [{"type": "core", "instances": None}]}, None])
def test_what_is_no_plan(wrong):
    with pytest.raises(DataError, match="not a plan"):
        PlanFile(Path("plan.json"), wrong).shares()


def test_every_service_loads_the_variant_the_plan_means(site, tmp_path):
    models = models_of(site, planned(site).gpus, tmp_path)
    assert {pair: model.location for pair, model in models.items()} == dict.fromkeys(
        (("steady", "quick"), ("wide", "heavy")), "tests.runtime.toy_models:Sum"
    )


def test_a_plan_of_other_services_is_refused(site, tmp_path):
    gpus = planned(site).gpus
    with pytest.raises(ConfigError, match=r"steady, .*site file does not name"):
        models_of(site.model_copy(update={"services": site.services[1:]}), gpus, tmp_path)
    (gpu,) = gpus
    without = [type(gpu)(gpu.type, 1.0, 1.0, 1.0, 1.0, 1.0, gpu.instances[:1])]
    with pytest.raises(ConfigError, match="the plan does not serve"):
        models_of(site, without, tmp_path)


def test_a_gpu_that_cannot_be_cut_so_is_named_with_what_it_offers():
    parts = LatencyParts(0.0, 0.0, 0.01, 0.0, 0.0)
    one = PlannedInstance("a", "m", 0, 1, 30.0, 3 / 7, 4, 0.0, 0.1, parts, 0.02, 100.0, 0.04, slice="3g.20gb")
    cut = PlannedGpu("A100-40GB", 1.0, 1.0, 1.0, 1.0, 1.0, (one,))
    model = {("a", "m"): ModelRef(ModelKind.PYTHON, "shop:m")}
    plan = PlanInForce.of((cut,), ((0,),), model, {"a": Slo(0.04, 0.9)}, ("gpu:0",), frozenset({"gpu:0"}))
    for board, said in (("NVIDIA A30", "no MIG profile '3g.20gb'"), ("NVIDIA A100-SXM4-40GB", "")):
        places = GpuPlaces(lambda *_: None, {"gpu:0": NvidiaMig(0, NvmlFake(gpu(board)))})
        here = LocalGpus(places, {"gpu:0": ()})
        if not said:
            _check_partitions(plan, here)
            continue
        with pytest.raises(ConfigError, match=said) as caught:
            _check_partitions(plan, here)
        assert "4g.24gb" in str(caught.value.expected)
    with pytest.raises(CapabilityError, match="CPU cores cannot stand"):
        _require_no_slices((cut,))
