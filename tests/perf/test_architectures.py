import csv
from collections import defaultdict

import numpy as np
import pytest

from joulery.domain.errors import ConfigError
from joulery.perf.catalog.architectures import architectures, operations_of, published_latency_s
from joulery.perf.catalog.muserve_models import CLOCKS_MHZ, MODELS
from joulery.perf.power.clock_curves import V100
from tests.data_folder import data_folder


@pytest.mark.parametrize("name", [name for name in architectures() if name != "ResNet-50"])
def test_operators_agree_with_the_published_list(name: str) -> None:
    work = defaultdict(lambda: np.zeros(3))
    for operation in operations_of(name):
        phase = "prefill" if operation.phase == "forward" else operation.phase
        base = operation.name.split(".", 1)[1] if operation.name.startswith("layer") else operation.name
        work[phase, base] += operation.count * np.array([1, operation.flops, operation.traffic_bytes])
    with (data_folder("muserve") / "table1_ops_emulated.csv").open() as handle:
        for row in csv.DictReader(handle):
            if row["model"] == name:
                count, flops, traffic = work.pop((row["phase"], row["base"]))
                listed = float(row["count"])
                assert count == listed
                assert flops == pytest.approx(listed * float(row["flops"]))
                # the list leaves the weights of the experts' attention out of one operator
                close = 0.02 if row["base"] == "xav" else 1e-6
                assert traffic == pytest.approx(listed * float(row["bytes"]), rel=close)
    assert not work


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_emulated_latencies_of_the_catalog(model) -> None:
    operations = operations_of(model.name)
    curve = V100.latency_s(operations, CLOCKS_MHZ)
    assert published_latency_s(model.name) == model.latency_s[-1]
    assert curve * model.latency_s[-1] / curve[-1] == pytest.approx(model.latency_s, rel=0.025)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("ResNet-50", 0.102), ("BERT-large", 1.34), ("GPT2-large", 3.1), ("OPT-1.3b", 5.26), ("Bloom-3b", 12.0)],
)
def test_weights_in_32_bits(name: str, gigabytes: float) -> None:
    assert sum(each.parameter_bytes for each in operations_of(name)) / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_operators_of_a_bert_layer() -> None:
    assert len(operations_of("BERT-base")) == 289
    assert len([each for each in operations_of("GPT2-large") if each.phase == "prefill"]) == 866


def test_an_unknown_model() -> None:
    with pytest.raises(ConfigError, match="no such model in the catalog") as caught:
        operations_of("GPT9")
    assert "GPT2-large" in str(caught.value)
