"""One default quantile, wherever an SLO is stated."""

from joulery.config.plan import TokenSloConfig
from joulery.config.scenario import TailConfig
from joulery.config.services import SloConfig
from joulery.domain.serving.service import DEFAULT_QUANTILE, Slo


def test_an_slo_without_a_quantile_means_the_same_everywhere():
    stated = [kind.model_validate({"latency": "10 ms"}) for kind in (SloConfig, TailConfig, TokenSloConfig)]
    assert {each.quantile_ratio for each in stated} == {DEFAULT_QUANTILE} == {Slo(0.01).quantile}
