"""Writes docs/reference/renamed.md from the old names that keys, flags and metrics declare in code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from scripts.cli_page import OTHER_FORMS

from joulery.config import schema
from joulery.config.scenario import scenario_schema
from joulery.gateway.llm_metrics import LLM_METRICS
from joulery.gateway.metrics import METRICS
from joulery.ui.cli import cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "renamed.md"
HEAD = """\
# Renamed keys, flags and metrics

The old words are read for one release. joulery prints one line with the new word when it meets an old one;
metrics and JSON output carry both. This page is written from the code: `python -m scripts.reference_pages`.
"""
BY_HAND = """\
## Output and files

| old | new | where |
| --- | --- | --- |
| `--format html` | `--html FILE` | `report`, `compare` |
| `what_if.draws` | `what_if.samples` | JSON of `report --what-if` |
| `moves` | `migrations` | JSON of `plan` |
| `promised_ratio` | `required_ratio` | plan files |
| `saving_with_idle_ratio` | `saving_machine_ratio` | JSON of `up`; both stay |
| schema `joulery.pool-plan/1` | schema `joulery.plan/1`, `kind: layouts` | plan files |
| `elder_share`, `elder_age_s` | `oldest_share`, `oldest_age_s` | parameters in a scheme's name |
| `shadow_url` | `standby_url` | `endpoints.json` of `plan --triton`; both stay |
| `told` | `signalled` | stop files of local jobs |
| decision `activate_shadow` | decision `activate_standby` | logs |
| decision `promise_broken` | decision `slo_violated` | logs |
| policy `shadow` | policy `standby` | logs |
| `shadow_percent`, `fewest`, `problem` | `standby_percent`, `min_requests`, `search` | policies in logs |

Files that earlier versions wrote (run folders, journals, plans, ledgers) are read. `joulery report` and
`joulery replay` print one line with the new word where a log has an old one. A replay of a log of joulery 0.1 compares
decisions without the wording of their reasons; where a rule of the policy changed since, it lists the decision as
different.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for title, head, rows in (
        ("Site and scenario files", "in", sorted(set(_keys()))),
        ("Flags", "verb", sorted(set(_flags()))),
        ("Metrics", "kind", [(m.old, m.name, m.kind) for m in (*METRICS, *LLM_METRICS) if m.old]),
    ):
        lines += [f"## {title}", "", f"| old | new | {head} |", "| --- | --- | --- |"]
        lines += [f"| `{old}` | `{new}` | {where} |" for old, new, where in rows]
        lines.append("")
    return "\n".join((*lines, BY_HAND))


def _keys() -> Iterator[tuple[str, str, str]]:
    """Old key, new key and section of every renamed key."""
    for kind, document in (("site file", schema()), ("scenario", scenario_schema())):
        parts: dict[str, Any] = {"top level": document, **document.get("$defs", {})}
        for section, part in parts.items():
            for old, new in part.get("x-renamed", {}).items():
                yield old, new, f"{kind}, {section.removesuffix('Config')}"


def _flags() -> Iterator[tuple[str, str, str]]:
    """Old flag, new flag and verb of every renamed flag."""
    context = click.Context(cli)
    for verb in cli.list_commands(context):
        command = cli.get_command(context, verb)
        assert command is not None
        for each in (command, *(form for _, form in OTHER_FORMS.get(verb, ()))):
            for option in each.params:
                old = getattr(option, "_old", None)
                if old is not None:
                    yield old, max(option.opts, key=len), f"`{verb}`"


if __name__ == "__main__":
    PAGE.write_text(page())
