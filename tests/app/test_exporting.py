"""Settings of the exporter, and what is refused before anything is opened."""

import dataclasses

import pytest

from joulery.app.exporting import LONGEST_S, ExportConfig, check, engine_spec, engine_specs, next_interval_s
from joulery.domain.errors import ConfigError


def test_a_configuration_survives_the_command_line():
    config = ExportConfig(port=1, engines=("http://a:1@gpu:0",), carbon={"zone": "GB"}, meters=("fake:50",), user="x")
    assert ExportConfig.from_json(config.to_json()) == config
    for text in ("", "{}", "[]", '{"meters": [], "engines": [], "more": 1}'):
        with pytest.raises(ConfigError, match="no exporter configuration"):
            ExportConfig.from_json(text)


@pytest.mark.parametrize(
    ("text", "name", "gpus"),
    [
        ("http://localhost:8000", "localhost:8000", ()),
        ("localhost:8000@gpu:0", "localhost:8000", ("gpu:0",)),
        ("http://h:8000/metrics@gpu:0,gpu:3,gpu:0", "h:8000", ("gpu:0", "gpu:3")),
        ("https://h", "h", ()),
    ],
)
def test_an_engine_as_it_is_named(text, name, gpus):
    spec = engine_spec(text)
    assert (spec.name, spec.gpus) == (name, gpus)


@pytest.mark.parametrize("text", ["", "@gpu:0", "h:1@gpu:x", "h:1@cpu", "http://u:secret@h:1"])
def test_no_engine(text):
    with pytest.raises(ConfigError, match="--engine"):
        engine_spec(text)


@pytest.mark.parametrize("texts", [("h:1", "http://h:1/metrics"), ("h:1@gpu:0", "h:2@gpu:1,gpu:0")])
def test_engines_that_would_be_counted_twice(texts):
    with pytest.raises(ConfigError):
        engine_specs(texts)


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": 65536},
        {"pue": 0.9},
        {"pue": float("nan")},
        {"pue": float("inf")},
        {"sample_s": 0.0},
        {"sample_s": float("nan")},
        {"engine_s": 1e9},
        {"otlp_s": 0.1},
        {"meters": ("no-such",)},
        {"meters": ("fake:-1",)},
        {"otlp": "collector"},
        {"otlp": "grpc://collector:4317"},
    ],
)
def test_what_is_wrong_is_said_before_anything_is_opened(wrong):
    check(ExportConfig())
    with pytest.raises(ConfigError):
        check(dataclasses.replace(ExportConfig(), **wrong))


def test_a_node_with_many_processes_is_sampled_less_often():
    assert next_interval_s(5.0, 0.003) == 5.0
    assert next_interval_s(5.0, 0.2) == pytest.approx(20.0)
    assert next_interval_s(5.0, 100.0) == LONGEST_S
