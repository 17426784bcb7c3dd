"""``joulery up``: a site file's services on this machine, measured, adapting, summed up."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from joulery.app.serving.up import Options
    from joulery.ui.reports.up_screen import Screen

INTERRUPTED = 130


@click.command("up")
@click.argument("file", metavar="SITE", type=click.Path(path_type=Path))
@click.option(
    "--duration", metavar="S", help="Run for so long, such as 30 or 30 s; the replayed day is fitted into it."
)
@click.option("--stay", is_flag=True, help="Go on serving when the load has ended, until Ctrl-C.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Keep the run here (a new folder in runs/)."
)
@click.option("--json-out", type=click.Path(path_type=Path), metavar="FILE", help="Write the summary here, as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object and nothing else.")
@click.option("--listen", metavar="HOST:PORT", help="Listen here instead of where the site file says.")
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Run this plan of joulery plan --out, with shadows; it follows changes of SITE.",
)
@click.option("--reprofile", is_flag=True, help="Profile again even where a profile is kept.")
def command(
    file: Path,
    duration: str | None,
    stay: bool,
    out: Path | None,
    json_out: Path | None,
    as_json: bool,
    listen: str | None,
    plan: Path | None,
    reprofile: bool,
) -> int:
    """Serve the site on this machine, send it its load, adapt to the grid, and say what it came to.

    It ends by itself when the load has ended; Ctrl-C ends it earlier, with the summary so far.
    """
    from joulery.app.serving.up import Options
    from joulery.config import load
    from joulery.store.files import write_named
    from joulery.ui.reports.up_screen import Silent

    site = listening(load(file), listen)
    seconds = None if duration is None else _seconds(duration)
    options = Options(site, seconds, stay, out, reprofile, tuple(sys.argv), file=file, plan=plan)
    report = run(options, Silent() if as_json else None)
    if report is None:
        click.echo("interrupted before anything was served", err=True)
        return INTERRUPTED
    if json_out is not None:
        write_named(json_out, json.dumps(report, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(report))
    return 0


def run(options: Options, screen: Screen | None = None) -> dict[str, Any] | None:
    """Run a site on an event loop of its own, until it ends or is told to.

    Args:
        options: What was asked for.
        screen: Where to speak; the console when None.

    Returns:
        The report; None when the end was asked for before there was anything to report.
    """
    from joulery.app.serving.up import Interrupted
    from joulery.ui.kit.console import table_console
    from joulery.ui.reports.up_screen import ConsoleScreen

    try:
        if screen is not None:
            return _until_ended(options, screen)
        with ConsoleScreen(table_console(120)) as terminal:
            report = _until_ended(options, terminal)
            terminal.summary(report)
            return report
    except Interrupted:
        return None


def _until_ended(options: Options, screen: Screen) -> dict[str, Any]:
    """Run on an event loop of its own; the first Ctrl-C or SIGTERM asks for the end, the second does not ask."""
    from joulery.app.serving.up import up

    async def run() -> dict[str, Any]:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        task = asyncio.current_task()

        def asked() -> None:
            if stop.is_set() and task is not None:
                task.cancel()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked)
        return await up(options, screen, stop)

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def listening(site: Any, listen: str | None) -> Any:
    """The site, listening elsewhere."""
    if listen is None:
        return site
    from pydantic import ValidationError

    from joulery.config.serving import ServingConfig
    from joulery.domain.errors import ConfigError

    fields = {**site.serving.model_dump(by_alias=True), "listen": listen}
    try:
        return site.model_copy(update={"serving": ServingConfig.model_validate(fields)})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        expected = first.get("ctx", {}).get("expected")
        raise ConfigError(str(first["msg"]), pointer="--listen", got=listen, expected=expected) from error


def _seconds(text: str) -> float:
    """``30``, ``30 s`` or ``2 min``."""
    from pydantic_core import PydanticCustomError

    from joulery.config.parsing.quantity import TIME, parse_quantity
    from joulery.domain.errors import ConfigError

    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parse_quantity(text, TIME)
        except PydanticCustomError as error:
            raise ConfigError(
                error.message(), pointer="--duration", got=text, expected="such as 30 s", hint=""
            ) from None
    if not 0 < seconds < float("inf"):
        raise ConfigError("a duration must be positive", pointer="--duration", got=text, expected="such as 30 s")
    return seconds
