import pytest

from joulery.app.serving.service import choose, service_setup
from joulery.app.wiring.engine import site_engine
from joulery.config.parsing.reading import load
from joulery.config.serving import RayEngine
from joulery.config.site import Mode
from joulery.domain.errors import ConfigError
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.predictive_search import PredictiveSearch
from tests.app.serving.test_service import profile
from tests.runtime.site_files import toy_site

CLOVER = "lambda: 10 %, base_intensity: 200 g/kWh"
LISTEN = 'serving: {listen: "127.0.0.1:0", drain: 2 s}'


def site(tmp_path, policy: str = CLOVER, **changed: str):
    return load(toy_site(tmp_path, changed={CLOVER: policy, **changed}))


def chosen(tmp_path, policy: str, **changed: str):
    found = site(tmp_path, policy, **changed)
    config = found.services[0]
    return choose(found, config, service_setup(found, config, tmp_path), profile())


def test_a_search_by_trials_and_its_budget(tmp_path):
    found = chosen(tmp_path, f"{CLOVER}, search: clover, trials: {{count: 4, clock: 1 min, longest: 5 s, seed: 7}}")
    policy = found.policy
    assert isinstance(policy, ServicePolicy) and policy.search.method == "clover" and policy.search.seed == 7
    assert (policy.search.budget.count, policy.search.budget.clock_s, policy.search.budget.longest_s) == (4, 60.0, 5.0)
    assert policy.search.baseline == found.base and len(policy.candidates) == 5
    assert found.trials is not None and found.trials.confidence_ratio == 0.95


def test_without_a_search_or_outside_act_it_decides_by_prediction(tmp_path):
    assert isinstance(chosen(tmp_path, CLOVER).policy.search, PredictiveSearch)
    advised = chosen(tmp_path, f"{CLOVER}, search: learning", **{"mode: act": f"mode: {Mode.ADVISE}"})
    assert isinstance(advised.policy.search, PredictiveSearch) and advised.trials is None
    assert "search: learning" in advised.remark and "mode: act" in advised.remark
    assert chosen(tmp_path, CLOVER, **{"mode: act": "mode: advise"}).remark == "", "prediction is what was asked for"
    assert chosen(tmp_path, f"{CLOVER}, search: learning").remark == ""


def test_an_accuracy_loss_takes_the_place_of_lambda(tmp_path):
    found = chosen(tmp_path, "accuracy_loss: 5 %, base_intensity: 200 g/kWh, search: learning").policy
    assert isinstance(found, ServicePolicy)
    assert (found.objectives.lambda_ratio, found.objectives.minimum_accuracy_ratio) == (1.0, pytest.approx(0.76))
    with pytest.raises(ConfigError, match="lambda or accuracy_loss"):
        site(tmp_path, f"{CLOVER}, accuracy_loss: 5 %")


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ("{count: 0}", "at least 1"),
        ("{longest: 10 min}", "longer than the search"),
        ("{confidence: 100 %}", "between 50 % and 100 %"),
        ("{min_requests: 3}", "at least 20"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(tmp_path, trials, words):
    with pytest.raises(ConfigError, match=words):
        site(tmp_path, f"{CLOVER}, search: learning, trials: {trials}")


def test_an_engine_on_ray(tmp_path):
    ray = '{kind: ray, address: auto, dashboard: "http://head:8265", claim: 0.25}'
    serving = site(tmp_path, **{LISTEN: f"serving: {{deadline: 7 s, engine: {ray}}}"}).serving
    assert isinstance(serving.engine, RayEngine)
    engine = site_engine(serving)
    assert (engine.settings.place.address, engine.settings.place.dashboard) == ("auto", "http://head:8265")
    assert (engine.settings.claim_ratio, engine.settings.deadline_s) == (0.25, 7.0)
    with pytest.raises(ConfigError, match="URL of its dashboard"):
        site(tmp_path, **{LISTEN: "serving: {engine: {kind: ray, address: auto}}"})
