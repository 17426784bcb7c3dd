"""Writes docs/metrics.md from the metric families declared in code."""

from pathlib import Path

from joulery.gateway.llm_metrics import LLM_METRICS
from joulery.gateway.metrics import MAX_LABELS, METRICS, OTHER

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


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
            "The gateway serves these at `/metrics` for Prometheus (text or OpenMetrics, as the scraper asks). Base",
            "units throughout: joules, grams, seconds, watts. A value that is not known is absent, never 0. The labels",
            f"`workload` and `owner` take at most {MAX_LABELS} values each; what comes later counts as `{OTHER}`.",
            "`quality` is measured, modelled or assumed.",
            "",
            "| name | kind | labels | what it says |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            "This page is written from the code: `python scripts/metrics_page.py`.",
            "",
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
