"""Profiles as JSON and back."""

import json
import math
from dataclasses import replace

import pytest

from joulery.domain.errors import DataError
from joulery.perf.catalog import names, profile
from joulery.perf.interference.document import as_document, from_document
from joulery.perf.interference.model import ModelFit


@pytest.mark.parametrize("name", names())
def test_there_and_back(name):
    one = replace(profile(name), fits=(ModelFit("ssd", "solo", (0.125, -0.25)),), notes=("a note",))
    back = from_document(json.loads(json.dumps(as_document(one))))
    assert back == replace(one, models=dict(one.models), bands=dict(one.bands))


def test_a_board_without_a_known_cap():
    one = replace(profile("v100"), gpu=replace(profile("v100").gpu, power_cap_w=math.inf))
    text = json.dumps(as_document(one), allow_nan=False)
    assert from_document(json.loads(text)).gpu.power_cap_w == math.inf


def test_the_quality_of_a_fit_is_written_down():
    fit = as_document(replace(profile("v100"), fits=(ModelFit("ssd", "solo", (0.1, -0.3)),)))["fits"][0]
    assert (fit["points"], fit["mape_ratio"], fit["max_ratio"]) == (2, pytest.approx(0.2), pytest.approx(0.3))


def broken(path, value):
    document = json.loads(json.dumps(as_document(profile("v100"))))
    at = document
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "not an interference profile"),
        ({"schema": "other/1"}, "schema is 'other/1'"),
        (broken(["models"], {}), "at least one model"),
        (broken(["models", "ssd", "k1"], KeyError), "ssd: missing coefficients: k1"),
        (broken(["models", "ssd", "k9"], 1.0), "no coefficient is called k9"),
        (broken(["models", "ssd", "k1"], "fast"), "expected a finite number"),
        (broken(["models", "ssd", "k1"], True), "expected a finite number"),
        (broken(["models", "ssd", "k1"], math.nan), "expected a finite number"),
        (broken(["models", "ssd"], 3), "expected an object"),
        (broken(["models", "ssd", "k4"], -50.0), "infinitely slow"),
        (broken(["models", "ssd", "k2"], -50.0), "no work to do"),
        (broken(["models", "ssd", "kernels"], -1), "kernels of -1 is impossible"),
        (broken(["models", "ssd", "pcie_contention"], 0.5), "pcie_contention of 0.5"),
        (broken(["models", "ssd", "cache_sensitivity"], -0.001), "cache_sensitivity of -0.001 is impossible"),
        (broken(["gpu", "delay_offset_ms"], -0.1), "delay_offset_ms of -0.1 is impossible"),
        (broken(["gpu", "unit_percent"], 0.0), "unit_percent of 0 is impossible"),
        (broken(["gpu", "clock_mhz_per_w"], 1.0), "clock_mhz_per_w of 1 is impossible"),
        (broken(["gpu", "pcie_bytes_per_ms"], 0), "pcie_bytes_per_ms of 0"),
    ],
)
def test_a_broken_profile_says_what_is_wrong(document, said):
    with pytest.raises(DataError, match=said) as caught:
        from_document(document, file="p.json")
    assert caught.value.file == "p.json"
