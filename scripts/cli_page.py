"""Writes docs/reference/cli.md from the commands that click declares."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from joulery.ui.cli import cli
from joulery.ui.cli.report_jobs import jobs_command
from joulery.ui.cli.report_sacct import sacct_command
from joulery.ui.cli.verbs import JOURNEYS

OTHER_FORMS = {"report": (("--from-sacct", sacct_command), ("--since", jobs_command))}
"""Commands that a verb becomes when a flag is given: verb -> (flag, command)."""
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"
HEAD = """\
# Command line

`joulery VERB --help` prints the same in a terminal. This page is written from the code:
`python -m scripts.reference_pages`.

## Exit codes

| code | meaning |
| --- | --- |
| 0 | done; also after Ctrl-C where the command stops cleanly |
| 1 | `joulery replay`: a decision differs; elsewhere a bug in joulery, please report it |
| 2 | wrong input (a flag, a key, a file), or a capability that this machine does not have |
| 3 | infeasible: no plan, layout or pool meets the constraints |
| 4 | a change to hardware or jobs did not complete |
| 130 | interrupted before anything was served |

`joulery measure` exits with the code of the measured command: `128 + n` after signal `n`, 127 for a command that does
not exist, 126 for one that may not be run.

## Shell completion

bash (in `~/.bashrc`), zsh (in `~/.zshrc`) and fish (in `~/.config/fish/completions/joulery.fish`):

```sh
eval "$(_JOULERY_COMPLETE=bash_source joulery)"
eval "$(_JOULERY_COMPLETE=zsh_source joulery)"
_JOULERY_COMPLETE=fish_source joulery | source
```

## Verbs
"""


def page() -> str:
    """The whole page: exit codes, completion, and every verb with its arguments and options."""
    context = click.Context(cli, info_name="joulery")
    lines = [HEAD, "| to | verb | purpose |", "| --- | --- | --- |"]
    for journey, verbs in JOURNEYS.items():
        for verb, text in verbs.items():
            lines.append(f"| {journey.lower()} | [`{verb}`](#joulery-{verb}) | {_cell(text)} |")
    lines.append("")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        lines += _command(command, context, name, level=3)
        for flag, form in OTHER_FORMS.get(name, ()):
            lines += _command(form, context, f"{name} {flag}", level=4)
    return "\n".join(lines)


def _command(command: click.Command, parent: click.Context, name: str, level: int) -> Iterator[str]:
    """The section of one command, then those of its subcommands."""
    context = click.Context(command, info_name=name, parent=parent)
    yield f"{'#' * level} joulery {_path(context)}"
    yield ""
    yield "```text"
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"{context.command_path} {usage}".rstrip()
    yield "```"
    yield ""
    for paragraph in inspect.cleandoc(command.help or "").replace("\f", "").split("\n\n"):
        literal = paragraph.startswith("\b")
        text = paragraph.removeprefix("\b").strip("\n")
        if literal:
            yield from ("```text", text, "```", "")
        elif text.strip():
            yield from (_escaped(" ".join(text.split())), "")
    rows = [_option(option, context) for option in command.params if isinstance(option, click.Option)]
    rows = [row for row in rows if row is not None]
    if rows:
        yield from ("| option | meaning |", "| --- | --- |", *rows, "")
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            inner = command.get_command(context, below)
            if inner is not None and not inner.hidden:
                yield from _command(inner, context, below, level + 1)


def _option(option: click.Option, context: click.Context) -> str | None:
    """One row of the table of options; None for hidden options and ``--help``."""
    record = option.get_help_record(context)
    if record is None or "--help" in option.opts:
        return None
    flags, meaning = record
    return f"| `{flags.replace('|', '∣')}` | {_cell(meaning)} |"


def _path(context: click.Context) -> str:
    """The command without the program's name."""
    return context.command_path.partition(" ")[2]


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """``text`` with the characters that Markdown would read as markup."""
    return text.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[").replace("_", "\\_")


if __name__ == "__main__":
    PAGE.write_text(page())
