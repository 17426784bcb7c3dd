"""Writes docs/metrics.md from the metric families declared in code."""

from pathlib import Path

from joulery.ui.metrics import reference_page

if __name__ == "__main__":
    (Path(__file__).resolve().parents[1] / "docs" / "metrics.md").write_text(reference_page())
