"""The systemd units of the examples: their commands are accepted by the command line."""

import shlex
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.test_commands import parse

UNITS = sorted((ROOT / "examples" / "slurm").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_every_command_of_a_unit_is_one_of_joulerys(unit: Path) -> None:
    settings = [line.partition("=") for line in unit.read_text().splitlines() if line[:1].isalpha()]
    commands = [shlex.split(value) for key, _, value in settings if key.startswith("Exec")]
    assert commands
    for program, *words in commands:
        assert program == "/opt/joulery/bin/joulery"
        parse(words)


def test_the_scheduler_and_the_agent_have_a_unit() -> None:
    assert sorted(unit.name for unit in UNITS) == [
        f"joulery-{part}{one}.service" for part in ("agent", "schedule") for one in ("", "@")
    ]
