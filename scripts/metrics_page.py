"""Writes docs/reference/metrics.md from the metric families declared in code."""

from pathlib import Path

from joulery.gateway.llm_metrics import LLM_METRICS
from joulery.gateway.metrics import MAX_LABELS, METRICS, OTHER

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"

HEAD = """\
The gateway exports metrics at `/metrics` for Prometheus (text or OpenMetrics):

```yaml
scrape_configs:
  - job_name: joulery
    static_configs: [{targets: ["127.0.0.1:8080"]}]
    # authorization: {credentials_file: token}     # beyond loopback, the gateway requires its bearer token
```

| to see | query |
| --- | --- |
| watts by workload | `sum by (workload) (rate(joulery_energy_joules_total[5m]))` |
| joules a request | `rate(joulery_request_energy_joules_sum[5m]) / rate(joulery_request_energy_joules_count[5m])` |
| grams an hour by owner | `3600 * sum by (owner) (rate(joulery_carbon_grams_total[15m]))` |
| SLO attainment | `joulery_slo_attainment_ratio` |

All values are in base units: joules, grams, seconds, watts. An unknown value is absent, never 0. `quality` is
measured, modelled or assumed.
"""


def page() -> str:
    """The whole page."""
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |"
        for m in (*METRICS, *LLM_METRICS)
    ]
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
            "This page is written from the code: `python -m scripts.reference_pages`.",
            "",
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
