"""Run benchmarks: ``python -m benchmarks [--write] [NAME…]``; the exit code is 1 where a bar was missed."""

from __future__ import annotations

import importlib
import os
import pkgutil
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil

import benchmarks
from benchmarks import Result

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Measured by `make bench` (`python -m benchmarks --write`). Each section names the machine and the day.

"""


def names() -> list[str]:
    """The benchmarks there are."""
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
    """The part of the page that belongs to a benchmark, between its marks."""
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"<!-- {name} -->\n{result.markdown()}\n*{day}, on {on}.*\n<!-- end {name} -->\n"


def write(name: str, text: str) -> None:
    """Replace the section of a benchmark in the page, or add it at the end."""
    page = PAGE.read_text() if PAGE.exists() else HEAD
    found = re.search(rf"<!-- {re.escape(name)} -->\n.*?<!-- end {re.escape(name)} -->\n", page, re.DOTALL)
    page = page[: found.start()] + text + page[found.end() :] if found else f"{page.rstrip()}\n\n{text}"
    PAGE.write_text(page)


def main(arguments: list[str]) -> int:
    """Run the benchmarks named, or all; the exit code."""
    known, wanted = names(), [argument for argument in arguments if argument != "--write"]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    missed = False
    for name in wanted or known:
        on = machine()
        result = importlib.import_module(f"benchmarks.{name}").run()
        text = section(name, result, on)
        print(text, flush=True)
        if "--write" in arguments:
            write(name, text)
        missed |= not all(held for _, held in result.checks)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
