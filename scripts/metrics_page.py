"""Writes docs/reference/metrics.md from the metric families declared in code."""

from pathlib import Path

from joulery.accounting.engine_energy import MAX_MODELS
from joulery.gateway.exporter.families import EXPORT_METRICS
from joulery.gateway.exporter.scheduler import SCHEDULER_METRICS
from joulery.gateway.families import Family
from joulery.gateway.joined.metrics import GATEWAY_METRICS
from joulery.gateway.llm_metrics import LLM_METRICS
from joulery.gateway.metrics import MAX_LABELS, METRICS, OTHER
from joulery.runtime.exporting.node import MAX_WORKLOADS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"

HEAD = """\
The gateway exports metrics at `/metrics` for Prometheus (text or OpenMetrics):

```yaml
scrape_configs:
  - job_name: joulery
    static_configs: [{targets: ["127.0.0.1:8080"]}]
    # authorization: {credentials_file: token}     # beyond loopback, the gateway requires its bearer token
```

With `serving.open_monitoring: true` in the site file, `/metrics` and `/v2/health/ready` answer without the token;
everything else still requires it.

| to see | query |
| --- | --- |
| watts by workload | `sum by (workload) (rate(joulery_energy_joules_total[5m]))` |
| joules a request | `rate(joulery_request_energy_joules_sum[5m]) / rate(joulery_request_energy_joules_count[5m])` |
| grams an hour by owner | `3600 * sum by (owner) (rate(joulery_carbon_grams_total[15m]))` |
| SLO attainment | `joulery_slo_attainment_ratio` |

All values are in base units: joules, grams, seconds, watts. An unknown value is absent, never 0. `quality` is
measured, modelled or assumed.
"""


EXPORTER = """\
## Node exporter

`joulery export` exports these at `http://127.0.0.1:9107/metrics` ([how to run it](../how-to/export.md)). Counters count
from the start of the exporter. `device` is `cpu` (all processors) where energy is divided, `cpu:0` ... where it
is metered.

A model's joules are a second view of the workloads' joules: do not add the two.
"""

SCHEDULER = """\
## Scheduler

`joulery jobs --listen 8090` exports these at `http://127.0.0.1:8090/metrics`, beside
[the scheduler's screen](../how-to/dashboard.md). `cluster` is the site's name where it has one cluster. An alert for a
scheduler that stopped: `time() - joulery_scheduler_last_round_timestamp_seconds > 3600`.
"""

QUERIES = {
    "watts by workload": "sum by (kind, workload) (rate(joulery_workload_energy_joules_total[5m]))",
    "joules an output token of a model": (
        "sum by (model) (rate(joulery_model_energy_joules_total[5m]))"
        ' / sum by (model) (rate(joulery_model_tokens_total{kind="output"}[5m]))'
    ),
    "grams a request of a model": (
        "sum by (model) (rate(joulery_model_carbon_grams_total[5m]))"
        " / sum by (model) (rate(joulery_model_requests_total[5m]))"
    ),
    "share of the node that idles": (
        "sum(rate(joulery_node_idle_joules_total[15m])) / sum(rate(joulery_node_divided_joules_total[15m]))"
    ),
    "kilowatt-hours a day by node": "sum by (instance) (increase(joulery_node_energy_joules_total[1d])) / 3.6e6",
}
"""Examples for the exporter's metrics."""


GATEWAYS = """\
## Several gateways

With [several gateways](../how-to/several-gateways.md) `/metrics` of each of them shows the metrics of the whole site,
which the controller makes, and four of its own. While the controller is away it shows its own alone.
"""
"""Section on the metrics of a site with several gateways."""


def _rows(families: tuple[Family, ...]) -> list[str]:
    return [f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |" for m in families]


def page() -> str:
    """The whole page."""
    rows = _rows((*METRICS, *LLM_METRICS))
    return "\n".join(
        (
            "# Metrics",
            "",
            *HEAD.splitlines(),
            f"`workload` and `owner` take at most {MAX_LABELS} values each; further values count as `{OTHER}`.",
            "",
            "| name | kind | labels | meaning |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            *GATEWAYS.splitlines(),
            "",
            "| name | kind | labels | meaning |",
            "| --- | --- | --- | --- |",
            *_rows(GATEWAY_METRICS),
            "",
            *EXPORTER.splitlines(),
            "",
            "| to see | query |",
            "| --- | --- |",
            *(f"| {what} | `{query}` |" for what, query in QUERIES.items()),
            "",
            f"At most {MAX_WORKLOADS} workloads and {MAX_MODELS} models of an engine have names; others are `{OTHER}`.",
            "",
            "| name | kind | labels | meaning |",
            "| --- | --- | --- | --- |",
            *_rows(EXPORT_METRICS),
            "",
            *SCHEDULER.splitlines(),
            "",
            "| name | kind | labels | meaning |",
            "| --- | --- | --- | --- |",
            *_rows(SCHEDULER_METRICS),
            "",
            "This page is written from the code: `python -m scripts.reference_pages`.",
            "",
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
