"""Run benchmarks: ``python -m benchmarks [--write] [--live] [--json FILE] [NAME…]``.

The exit code is 0 if every bar was run and holds, 1 if a bar was missed, 2 for an unknown name, and 3 if no bar was
missed but a benchmark, or a bar, was not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil

import benchmarks
from benchmarks import NotRun, Result

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Measured by `make bench` (`python -m benchmarks --write`). Each section names the machine and the day.

"""


def names() -> list[str]:
    """Names of all benchmarks."""
    return [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")]


def machine() -> str:
    """This machine and its software, in one line."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    cpu = model[1].strip() if model else platform.processor() or platform.machine()
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"{len(os.sched_getaffinity(0))} x {cpu}, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the start"
    )


def section(name: str, result: Result, on: str) -> str:
    """The section of a benchmark in the page, between its markers."""
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"<!-- {name} -->\n{result.markdown()}\n*{day}, on {on}.*\n<!-- end {name} -->\n"


def write(name: str, text: str) -> None:
    """Replace the section of a benchmark in the page, or add it at the end."""
    page = PAGE.read_text() if PAGE.exists() else HEAD
    found = re.search(rf"<!-- {re.escape(name)} -->\n.*?<!-- end {re.escape(name)} -->\n", page, re.DOTALL)
    page = page[: found.start()] + text + page[found.end() :] if found else f"{page.rstrip()}\n\n{text}"
    PAGE.write_text(page)


def main(arguments: list[str]) -> int:
    """Run the named benchmarks, or all of them, and return the exit code."""
    known = names()
    options = _parser(known).parse_args(arguments)
    wanted = [name if name.endswith("_live") or not options.live else f"{name}_live" for name in options.names]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    missed, complete = False, True
    figures: dict[str, object] = {}
    for name in wanted or known:
        on = machine()
        try:
            result = importlib.import_module(f"benchmarks.{name}").run()
        except NotRun as reason:
            print(f"## {name}\n\n- **not run**: {reason}\n", flush=True)
            complete = False
            continue
        text = section(name, result, on)
        print(text, flush=True)
        figures[name] = result.as_dict()
        if options.write and result.complete:
            write(name, text)
        missed |= result.missed
        complete &= result.complete
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if missed else 0 if complete else 3


def _parser(known: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Run benchmarks and print whether their bars hold.",
        epilog=f"Benchmarks: {', '.join(known)}. Exit code: 0 every bar holds, 1 one was missed, 2 an unknown name or "
        "option, 3 something was not run.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; all where none is named")
    parser.add_argument("--write", action="store_true", help=f"keep the results in {PAGE.parent.name}/{PAGE.name}")
    parser.add_argument("--live", action="store_true", help="the live form of those named")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
