"""The metric families of the node exporter; ``docs/reference/metrics.md`` is written from ``EXPORT_METRICS``."""

from __future__ import annotations

from joulery.gateway.families import Family

_WORKLOAD = ("kind", "workload")
_MODEL = ("engine", "model")
_OF_DEVICE = ("device", "quality")

EXPORT_METRICS = (
    Family(
        "joulery_node_energy_joules_total",
        "counter",
        ("device", "component", "meter", "quality"),
        "Metered energy of a device since the exporter started.",
    ),
    Family(
        "joulery_power_watts",
        "gauge",
        ("device", "component", "meter", "quality"),
        "Present power of one channel; absent while unknown.",
    ),
    Family(
        "joulery_meter_staleness_seconds",
        "gauge",
        ("device", "component", "meter"),
        "Time since the last reading of one channel; infinite when there was none.",
    ),
    Family(
        "joulery_meter_faults_total",
        "counter",
        ("device", "component", "meter"),
        "Times that a counter was reset or could not be trusted; the joules of these intervals are left out.",
    ),
    Family(
        "joulery_workload_energy_joules_total",
        "counter",
        (*_WORKLOAD, *_OF_DEVICE),
        "Energy of a device that a workload used; workloads, idle and unattributed add up to the divided energy.",
    ),
    Family(
        "joulery_node_idle_joules_total",
        "counter",
        _OF_DEVICE,
        "Energy of a device while nothing used it.",
    ),
    Family(
        "joulery_node_unattributed_joules_total",
        "counter",
        _OF_DEVICE,
        "Energy of a device whose user is not known.",
    ),
    Family(
        "joulery_node_divided_joules_total",
        "counter",
        _OF_DEVICE,
        "Energy divided so far; device cpu is all processors.",
    ),
    Family(
        "joulery_workload_carbon_grams_total",
        "counter",
        _WORKLOAD,
        "Grams of CO2-equivalent of a workload's energy with a known intensity; facility overhead included.",
    ),
    Family(
        "joulery_node_carbon_grams_total",
        "counter",
        ("part",),
        "Grams of CO2-equivalent of the node: workloads, idle, unattributed.",
    ),
    Family(
        "joulery_carbon_unknown_joules_total",
        "counter",
        (),
        "Energy of the node for which no carbon intensity was known; its grams are in no sum.",
    ),
    Family(
        "joulery_carbon_intensity_grams_per_kilowatthour",
        "gauge",
        ("zone", "source", "basis", "signal", "scope"),
        "Carbon intensity in use; basis is live, replayed or assumed.",
    ),
    Family(
        "joulery_carbon_intensity_known_ratio",
        "gauge",
        (),
        "1 while the carbon intensity of now is known, held values included; 0 while it is not.",
    ),
    Family(
        "joulery_engine_up",
        "gauge",
        ("engine", "kind"),
        "1 while an inference engine answers, else 0.",
    ),
    Family(
        "joulery_engine_restarts_total",
        "counter",
        ("engine",),
        "Times that the engine's own counters started again.",
    ),
    Family(
        "joulery_engine_energy_joules_total",
        "counter",
        ("engine", "part", "quality"),
        "Energy of an engine's processes and GPUs by part: models, idle, unattributed.",
    ),
    Family(
        "joulery_model_energy_joules_total",
        "counter",
        (*_MODEL, "quality"),
        "Energy of a model: the engine's, by the tokens of each model.",
    ),
    Family(
        "joulery_model_carbon_grams_total",
        "counter",
        _MODEL,
        "Grams of CO2-equivalent of a model's energy with a known intensity.",
    ),
    Family(
        "joulery_model_tokens_total",
        "counter",
        (*_MODEL, "kind"),
        "Tokens that the engine counted over the time whose energy is known: prompt, output.",
    ),
    Family(
        "joulery_model_requests_total",
        "counter",
        _MODEL,
        "Answered requests that the engine counted over the time whose energy is known.",
    ),
    Family(
        "joulery_model_joules_per_token",
        "gauge",
        (*_MODEL, "tokens"),
        "Energy of a model per token over the last 5 minutes: per output token, or per token of either kind (all).",
    ),
    Family(
        "joulery_model_grams_per_token",
        "gauge",
        (*_MODEL, "tokens"),
        "Grams of CO2-equivalent per token over the last 5 minutes; absent while an intensity is unknown.",
    ),
    Family(
        "joulery_model_joules_per_request",
        "gauge",
        _MODEL,
        "Energy of a model per answered request over the last 5 minutes.",
    ),
    Family(
        "joulery_model_grams_per_request",
        "gauge",
        _MODEL,
        "Grams of CO2-equivalent per answered request over the last 5 minutes; absent while an intensity is unknown.",
    ),
    Family(
        "joulery_exporter_cpu_seconds_total",
        "counter",
        (),
        "CPU time of the exporter itself.",
    ),
    Family(
        "joulery_exporter_resident_bytes",
        "gauge",
        (),
        "Resident memory of the exporter itself.",
    ),
    Family(
        "joulery_build_info",
        "gauge",
        ("version", "python"),
        "Always 1; the labels name the version that runs.",
    ),
)
