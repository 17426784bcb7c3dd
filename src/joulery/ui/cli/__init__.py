"""The command line: one module per verb, imported when the verb is called.

``main`` turns every :class:`~joulery.domain.errors.JouleryError` into one message on standard error (one JSON object
with ``--json``) and an exit code: 0 ok, 1 bug, 2 input or capability, 3 infeasible, 4 actuation.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import click

from joulery import __version__
from joulery.domain.errors import CapabilityError, JouleryError
from joulery.domain.renames import RenamedWarning
from joulery.extras import missing_extra
from joulery.ui.cli.streams import OutputError, discard, lost_if_refused, standard_streams
from joulery.ui.cli.verbs import JOURNEYS, VERBS


class LazyGroup(click.Group):
    """A group of verbs by name, each imported only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order of ``JOURNEYS``."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a verb, imported now; None when there is no such verb."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"joulery.ui.cli.{cmd_name.replace('-', '_')}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command to run.

        Raises:
            UsageError: No such verb; names the nearest one.
        """
        if args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else "'joulery --help' lists the commands."
            raise click.UsageError(f"No such command '{args[0]}'. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs by journey, without importing any of them."""
        width = max(map(len, VERBS))
        for journey, verbs in JOURNEYS.items():
            with formatter.section(journey):
                formatter.write_dl([(verb.ljust(width), help_) for verb, help_ in verbs.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="joulery")
def cli() -> None:
    """Measure the energy and carbon of machine learning, then plan, serve and schedule to use less."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with standard_streams(), warnings.catch_warnings():
        _print_renamed_names()
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    """Run the command line; turn every error of the user into a message and an exit code."""
    try:
        result = cli.main(args=arguments, prog_name="joulery", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except JouleryError as error:
        return _refuse(error, arguments)
    except ModuleNotFoundError as error:
        missing = missing_extra(error, arguments[0] if arguments else "")
        if missing is None:
            raise
        return _refuse(missing, arguments)
    except click.ClickException as error:
        with lost_if_refused():
            if _as_json(arguments):
                _print_usage_error(error)
            else:
                error.show()
        return 2
    except click.Abort:
        with lost_if_refused():
            click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        discard(sys.stdout)
        return 141
    except FileNotFoundError:
        if not _current_folder_is_gone():
            raise
        return _refuse(CapabilityError("the current folder is gone", hint="cd to one that is there"), arguments)
    except OutputError as error:
        discard(sys.stdout)
        return _refuse(error.as_error(), arguments)


def _current_folder_is_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _refuse(error: JouleryError, arguments: Sequence[str]) -> int:
    with lost_if_refused():
        report_error(error, as_json=_as_json(arguments))
    return error.exit_code


def _as_json(arguments: Sequence[str]) -> bool:
    """Whether ``--json`` is given; flags after ``--`` belong to another program."""
    return "--json" in itertools.takewhile("--".__ne__, arguments)


def _print_usage_error(error: click.ClickException) -> None:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = "" if context is None else f"{context.command_path} --help"
    document = {"kind": "usage", "message": error.format_message(), "hint": hint}
    click.echo(json.dumps({"error": document}), err=True)


def _print_renamed_names() -> None:
    """Print each use of an old name as one line on standard error; leave other warnings as they are."""
    show = warnings.showwarning

    def print_line(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, RenamedWarning):
            click.echo(f"joulery: {message}", err=True)
        else:
            show(message, category, filename, lineno, file, line)

    warnings.simplefilter("always", RenamedWarning)
    warnings.showwarning = print_line


def report_error(error: JouleryError, *, as_json: bool) -> None:
    """Print an error on standard error: what is wrong, where, and how to fix it."""
    if as_json:
        click.echo(json.dumps({"error": error.as_dict()}, default=str), err=True)
        return
    click.echo(f"joulery: {error}", err=True)
    if error.hint:
        click.echo(f"  {error.hint}", err=True)
