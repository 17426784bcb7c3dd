"""Every command on the pages is accepted by the command line, and those that take seconds are run.

``LEFT_OUT`` says why a command is only parsed.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
from scripts.cli_page import OTHER_FORMS

from joulery.ui.cli import cli
from tests.command import Done, joulery
from tests.docs import test_consoles
from tests.docs.pages import OPERATORS, ROOT, arguments, commands, name, pages, spans

LEFT_OUT = {
    r"--zone (GB|electricity-maps|watttime)\b": "asks a service on the network",
    r"^up ": "runs for minutes; tests/e2e run the same examples, shortened",
    r"^serve (?!.*(lite9|0\.0\.0\.0))": "runs until Ctrl-C; test_snippets starts a server",
    r"^jobs --(listen|html)": "needs a site with jobs; tests/ui/dashboard serve one",
    r"^export (?!--once)": "runs until Ctrl-C; tests/e2e start exporters",
    r"^simulate ": "test_consoles runs those whose output is shown",
    r"^schedule ": "runs until Ctrl-C, or needs Slurm; tests/e2e run both",
    r"--trace (torch|jax)|runs/(bert|jax)": "needs PyTorch or JAX; tests/adapters/tracers record both",
    r"^train-length-predictor ": "needs the log of a service; tests/ui/cli train one",
    r"^account ": "needs a trace; tests/ui/cli account several",
    r"^report --by owner --since": "needs the journal of a scheduler; tests/ui/cli report one",
    r"--series": "needs rates that change; tests/ui/cli plan a series",
    r"--envelope": "takes minutes of CPU; tests/app/planning make a small one and look plans up",
    r"^replay |runs/2026": "names a run of another machine",
    r"^profile (photos|--from|--fit)|--colocate": "measures for minutes, or needs measurements",
    r"\b(DIR|FILE|CMD|FOLDER|SCENARIO)\b": "a pattern, not a command",
    r"joint-mig": "needs a published table of measurements; tests/app/planning plan it where it is",
    r"muserve-plan|clover-pool|poisson\.yaml": "plans for longer than a test should take",
}
EXPECTED = {"lite9.onnx": 2, "0.0.0.0": 2}
"""Part of a command, and the exit code that its page shows."""
NO_PROGRAM = {"config", "doctor", "jobs", "ledger", "plan", "profile", "report", "submit", "when"}
"""These start no program: where nothing else is on the line, they run in this process."""
EVERY = [(page, command) for page in pages() for command in commands(page) if "..." not in command]
WORK = "print(sum(i * i for i in range(100_000)))\n"
SACCT = """\
JobID|JobName|User|Account|Partition|State|Submit|Eligible|Start|End|ElapsedRaw|AllocTRES
1|bert|ada|nlp|gpu|COMPLETED|{day}T00:00:00|{day}T00:00:00|{day}T00:10:00|{day}T02:10:00|7200|billing=8,cpu=8,gres/gpu=2,node=1
2|gpt|bob|vision|gpu|COMPLETED|{day}T01:00:00|{day}T01:00:00|{day}T01:10:00|{day}T05:10:00|14400|billing=8,cpu=8,gres/gpu=1,node=1
"""


def reason(command: str) -> str | None:
    """Why ``command`` is only parsed; None where it is run."""
    words = " ".join(arguments(command))
    if any(words == shown for _, shown, _ in test_consoles.SHOWN):
        return "test_consoles runs it, and compares what it prints"
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, words)), None)


def parse(words: list[str]) -> None:
    """Give ``words`` to the command line without running anything; raises click's errors."""
    group: click.Group = cli
    context = click.Context(cli, info_name="joulery")
    while True:
        verb, command, words = group.resolve_command(context, words)
        assert command is not None, verb
        context = command.make_context(verb, list(words), parent=context)
        if not isinstance(command, click.Group):
            return
        group, words = command, [*context._protected_args, *context.args]


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files are taken as they are: the pages' files are not here."""
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: value)


@pytest.mark.parametrize(("page", "command"), EVERY, ids=[f"{name(page)}: {command[:60]}" for page, command in EVERY])
@pytest.mark.usefixtures("no_files")
def test_a_command_on_a_page_is_accepted(page: Path, command: str) -> None:
    parse(arguments(command))


@pytest.mark.parametrize("page", pages(), ids=name)
def test_the_flags_in_the_text_exist(page: Path) -> None:
    for span in spans(page):
        verb, *words = span.split()[1:]
        if not re.fullmatch(r"[a-z][a-z-]*", verb):
            continue
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None, span
        forms = [command, *(form for _, form in OTHER_FORMS.get(verb, ()))]
        known = {flag for form in forms for option in options(form) for flag in (*option.opts, *option.secondary_opts)}
        until = words.index("--") if "--" in words else len(words)
        for word in words[:until]:
            if word.startswith("-") and re.fullmatch(r"-{1,2}[a-z][a-z-]*", word):
                assert word in known, f"{span}: {verb} has no {word}"


def options(command: click.Command) -> list[click.Option]:
    """The options shown by a command's help, and by those of its subcommands."""
    found = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    found.append(click.Option(["--help", "-h"]))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            inner = command.get_command(context, below)
            assert inner is not None
            found += options(inner)
    return found


def run_by(page: Path) -> list[str]:
    """The commands that are run for ``page``: what an earlier page shows, too, is run there."""
    before = pages()[: pages().index(page)]
    earlier = {plain(command) for other in before for command in commands(other)}
    found = dict.fromkeys(plain(command) for command in commands(page) if reason(command) is None)
    return [command for command in found if command not in earlier]


def plain(command: str) -> str:
    """A command as it is typed with the environment activated."""
    return command.removeprefix(".venv/bin/")


def runnable() -> list[Path]:
    return [page for page in pages() if run_by(page)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the pages name."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for script in ("work.py", "train.py"):
        (tmp_path / script).write_text(WORK)
    (tmp_path / "grid.csv").write_text(grid())
    (tmp_path / "GB_2023.csv").write_text(grid())
    day = datetime.fromtimestamp(time.time() - 5 * 86400, UTC).date()
    (tmp_path / "jobs.txt").write_text(SACCT.format(day=day))
    for photo in ("own.onnx", "token"):
        (tmp_path / photo).write_text("")
    (tmp_path / "photos").mkdir()
    return tmp_path


def grid() -> str:
    """Hourly intensities around now, in the usual columns."""
    first = int(time.time()) // 3600 - 24 * 8
    rows = (
        f"{datetime.fromtimestamp(3600 * hour, UTC):%Y-%m-%dT%H:%MZ},200,150" for hour in range(first, first + 24 * 16)
    )
    return "\n".join(("timestamp_utc,ci_lifecycle,ci_direct", *rows, ""))


def site(page: Path) -> str:
    """The longest site file that ``page`` shows."""
    return max(re.findall(r"```yaml\n(joulery: 1\n.*?)```", page.read_text(), re.DOTALL), key=len, default="")


@pytest.mark.slow
@pytest.mark.parametrize("page", runnable(), ids=name)
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    environment = {
        **os.environ,
        "JOULERY_STATE": str(folder / "state"),
        "JOULERY_LEDGER": str(folder / "ledger.db"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    environment.pop("JOULERY_JOB", None)
    shim = folder / "bin"
    shim.mkdir()
    (shim / "joulery").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m joulery "$@"\n')
    (shim / "joulery").chmod(0o755)
    environment["PATH"] = f"{shim}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (folder / "site.yaml").write_text(site(page))
    (folder / "changed.yaml").write_text(site(page).replace("rate: 300 /s", "rate: 400 /s"))
    if name(page) == "docs/how-to/report.md":
        run("joulery measure --zone typical:GB --owner vision --out runs/b -- python train.py", folder, environment)
    for command in run_by(page):
        done = run(command, folder, environment)
        expected = next((code for part, code in EXPECTED.items() if part in command), 0)
        assert done.returncode == expected, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr, f"{command}\n{done.stderr}"
        if command.endswith("--json"):
            json.loads(done.stdout)


def run(command: str, folder: Path, environment: Mapping[str, str]) -> Done | subprocess.CompletedProcess[str]:
    """``command`` in ``folder``: in a shell, or in this process where it needs neither a shell nor a program."""
    words = shlex.split(command, comments=True)
    if words[0] == "joulery" and words[1] in NO_PROGRAM and not OPERATORS.intersection(words):
        return joulery(*words[1:], folder=folder, environment=environment)
    return subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
