"""``python -m joulery.runtime.load``: send one load, write its outcomes, print their summary as one line of JSON.

SIGTERM and SIGINT end it early, with the outcomes so far. With ``--parent`` the end of the parent process does the
same.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import math
import os
import resource
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from joulery.domain.errors import JouleryError
from joulery.runtime.load.load_plan import LoadPlan, bodies_of
from joulery.runtime.load.process import TOKEN
from joulery.runtime.load.sender import Sender

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the load and return the exit code of the process."""
    options = _options(arguments)
    parent = options.pop("parent")
    if parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return 0
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a connection is an open file
    try:
        plan = LoadPlan(**options)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            summary = runner.run(_run(plan))
    except JouleryError as error:
        sys.stderr.write(f"joulery load: {error}\n" + (f"  {error.hint}\n" if error.hint else ""))
        return error.exit_code
    sys.stdout.write(summary + "\n")
    return 0


async def _run(plan: LoadPlan) -> str:
    times_s = plan.times_s()
    path, bodies = bodies_of(plan)
    sender = Sender(
        plan.url,
        path,
        bodies,
        connections=plan.connections,
        timeout_s=plan.timeout_s,
        token=os.environ.get(TOKEN),
        certificate=plan.certificate,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, sender.stop)
    await (sender.run_closed(plan.duration_s) if plan.closed else sender.run(times_s))
    sender.outcomes.write(Path(plan.out))
    summary = sender.outcomes.summary(math.nan if plan.slo_s is None else plan.slo_s)
    planned = len(sender.outcomes) if plan.closed else len(times_s)
    return orjson.dumps({**summary, "planned": planned, "unsent": planned - summary["sent"], "out": plan.out}).decode()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return factory


def _options(arguments: list[str]) -> dict[str, Any]:
    """The plan's fields, from ``--plan`` or one by one, and ``parent``."""
    parser = argparse.ArgumentParser("python -m joulery.runtime.load", description=LoadPlan.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--plan", help="the whole plan as a JSON object")
    parser.add_argument("--parent", type=int, help="end when this parent process does")
    for field in fields(LoadPlan):
        flag = f"--{field.name.replace('_', '-')}"
        if field.type == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        else:
            parser.add_argument(flag, type={"str": str, "int": int}.get(str(field.type).split(" |")[0], float))
    given = vars(parser.parse_args(arguments))
    plan = given.pop("plan")
    options: dict[str, Any] = orjson.loads(plan) if plan else {}
    options.update({name: value for name, value in given.items() if value is not None})
    for missing in (name for name in ("url", "service", "inputs", "out") if name not in options):
        parser.error(f"--{missing} is needed")
    options.setdefault("parent", None)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
