"""``joulery up``: serve a site file's services on this machine, measured and adapted to the grid."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.ui.cli.numpy_threads import keep_numpy_on_one_thread
from joulery.ui.cli.options import Time

if TYPE_CHECKING:
    from joulery.app.serving.up import Options
    from joulery.app.serving.view import ServeView

INTERRUPTED = 130


@click.command("up")
@click.argument("file", metavar="SITE", type=click.Path(path_type=Path))
@click.option(
    "--duration",
    "duration_s",
    type=Time("30 s", bare="s"),
    help="Run this long; a plain number is seconds. A replayed day of the grid is fitted into it.",
)
@click.option("--stay", is_flag=True, help="Continue to serve after the load has ended, until Ctrl-C.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Keep the run here (a new folder in runs/)."
)
@click.option("--json-out", type=click.Path(path_type=Path), metavar="FILE", help="Write the summary here, as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object and nothing else.")
@click.option("--listen", metavar="HOST:PORT", help="Listen here instead of at the site file's address.")
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Run this plan of joulery plan --out, with standbys; it follows changes of SITE. With plan.preset joint in "
    "SITE, a plan is made where none is named. With a plan of language models, check the site's servers against it.",
)
@click.option("--reprofile", is_flag=True, help="Profile again even where a profile is kept.")
def command(
    file: Path,
    duration_s: float | None,
    stay: bool,
    out: Path | None,
    json_out: Path | None,
    as_json: bool,
    listen: str | None,
    plan: Path | None,
    reprofile: bool,
) -> int:
    """Serve a site on this machine, send it its load, adapt to the grid, and print a summary.

    It ends when the load has ended; Ctrl-C ends it earlier, with the summary so far.
    """
    keep_numpy_on_one_thread()
    from joulery.app.serving.up import Options
    from joulery.config import load
    from joulery.store.files import write_named
    from joulery.ui.reports.up_screen import Silent

    site = listening(load(file), listen)
    options = Options(site, duration_s, stay, out, reprofile, tuple(sys.argv), file=file, plan=plan)
    report = run(options, Silent() if as_json else None)
    if report is None:
        click.echo("interrupted before anything was served", err=True)
        return INTERRUPTED
    if json_out is not None:
        write_named(json_out, json.dumps(report, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(report))
    return 0


def run(options: Options, screen: ServeView | None = None) -> dict[str, Any] | None:
    """Run a site on its own event loop, until it ends or is interrupted.

    Args:
        options: The site and the options of the run.
        screen: Shows the run; the console when None.

    Returns:
        The report; None for a run interrupted before anything was served.
    """
    from joulery.app.serving.up import Interrupted
    from joulery.config.parsing.located import located
    from joulery.ui.kit.console import table_console
    from joulery.ui.reports.up_screen import ConsoleScreen

    try:
        with nullcontext() if options.file is None else located(options.file):
            if screen is not None:
                return _with_page(_until_ended(options, screen))
            with ConsoleScreen(table_console(120)) as terminal:
                report = _with_page(_until_ended(options, terminal))
                terminal.summary(report)
                return report
    except Interrupted:
        return None


def _with_page(report: dict[str, Any]) -> dict[str, Any]:
    """Write the HTML report into the run folder, and return the report with its path."""
    from joulery.app.runs.recorded import load_run
    from joulery.store.files import write_atomically
    from joulery.ui.reports.html import render_html
    from joulery.ui.reports.table import roll_up

    folder = Path(report["run"])
    text = render_html(roll_up([load_run(folder, with_timeline=True)], "component"))
    write_atomically(folder / "report.html", lambda file: file.write(text.encode()))
    return {**report, "html": str(folder / "report.html")}


def _until_ended(options: Options, screen: ServeView) -> dict[str, Any]:
    """Run on a new event loop; the first Ctrl-C or SIGTERM ends the run in order, the second at once."""
    from joulery.app.serving.up import up
    from joulery.ui.dashboard.routes import dashboard_routes

    async def run() -> dict[str, Any]:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        task = asyncio.current_task()

        def interrupted() -> None:
            if stop.is_set() and task is not None:
                task.cancel()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted)
        return await up(options, screen, stop, dashboard_routes)

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
    """The site with another address to listen on."""
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
