"""The verbs by journey, with their one-line help; ``some-verb`` is ``joulery.ui.cli.some_verb.command``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

JOURNEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Measure": {
            "measure": "Run a command and measure its energy: joules by device, grams of CO2e.",
            "report": "Report recorded runs: joules, grams, owners, and how well each is known.",
            "compare": "Compare traced runs layer by layer: what got better, what got worse.",
            "account": "Charge recorded power to recorded operations: joules by tensor operation.",
            "precision": "Judge traced runs: how similar they are, and what the sensor resolves.",
            "export": "Export this node's energy to Prometheus: by device, workload, model, token and request.",
            "rapl-helper": "Read the processors' energy counters as root, for users who may not.",
            "monitor": "Measure processes in any language that ask for it over a Unix socket.",
        },
        "Plan": {
            "plan": "Plan how many GPUs the services need, which ones share, the cost, and the gap to the optimum.",
            "profile": "Measure latency and energy of a service's variants on the slices of this machine.",
        },
        "Serve": {
            "up": "Serve a site file on this machine under load, adapt to the grid, and report.",
            "serve": "Serve models behind the gateway: Open Inference Protocol and OpenAI API.",
            "gateway": "Add a gateway on another machine to a running site: same replicas, same controller.",
            "train-length-predictor": "Train a predictor of output lengths from a request log, and score it.",
        },
        "Schedule": {
            "when": "Find the start of a job that causes the least carbon, by a forecast.",
            "schedule": "Schedule training jobs by carbon and energy: beside Slurm, or on this machine.",
            "submit": "Queue a training job on this machine.",
            "jobs": "List the training jobs of a site, or cancel one.",
            "agent": "Meter the jobs of one Slurm node for the scheduler.",
        },
        "Simulate": {
            "simulate": "Run a scenario in virtual time: policies side by side on the same requests or jobs.",
            "replay": "Repeat a recorded run's decisions from its log alone, and compare.",
        },
        "Operate": {
            "doctor": "Check what can be read and set on this machine, and how to grant what is missing.",
            "config": "Check a site file, print it with its defaults, or print its schema.",
            "ledger": "Keep energy and carbon by owner, workload, device and hour, and carbon budgets.",
        },
    }
)
"""One-line help by verb, by journey: the order of ``joulery --help``."""

VERBS: Mapping[str, str] = MappingProxyType(
    {verb: help_ for verbs in JOURNEYS.values() for verb, help_ in verbs.items()}
)
"""One-line help by verb."""
