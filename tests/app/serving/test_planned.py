"""A plan read back, and what of it does not fit the site."""

import json
from pathlib import Path

import pytest

from joulery.app.planning.shares import share_request
from joulery.app.serving.planned import models_of
from joulery.config import load
from joulery.domain.errors import ConfigError, DataError
from joulery.policies.placement.provisioning.planner import provision
from joulery.store.plan_documents import document_of
from joulery.store.plans import PlanFile
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
