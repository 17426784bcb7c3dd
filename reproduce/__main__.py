"""``python -m reproduce``: one command per paper."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType

import click

from joulery.domain.errors import JouleryError
from joulery.ui.cli import report_error

PAPERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "clover": ("reproduce.clover.command", "Clover (SC'23): carbon against accuracy in serving, Figs. 9 to 16."),
        "green": ("reproduce.green.command", "GREEN (NSDI'25): carbon-aware training schedules, Figs. 8 to 13."),
        "igniter": ("reproduce.igniter", "iGniter (TPDS'23): interference-aware GPU provisioning."),
        "muserve": ("reproduce.muserve", "mu-Serve (ATC'24): power-aware placement and clocks."),
        "smaragdine": ("reproduce.smaragdine", "Smaragdine: energy of tensor operations from sampled power."),
    }
)
"""Module and one-line help by paper."""


class _Papers(click.Group):
    """A command group that imports a paper's module when its command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(PAPERS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in PAPERS:
            return None
        command = importlib.import_module(PAPERS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Papers"):
            formatter.write_dl([(name, help_) for name, (_, help_) in PAPERS.items()])


@click.group(cls=_Papers, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def papers() -> None:
    """Compute a paper's figures again: each claim, joulery's figure, and whether the claim holds."""


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        result = papers.main(args=arguments, prog_name="python -m reproduce", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except JouleryError as error:
        report_error(error, as_json="--json" in arguments)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except click.Abort:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
