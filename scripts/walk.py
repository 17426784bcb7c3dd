"""Prints the modules that a command calls, in order of the first call: ``python -m scripts.walk plan SITE [FLAG…]``.

A module counts if one of its functions runs. The list leaves out the command line's own frame, values (``domain``), the
site file (``config``), tables (``perf/catalog``) and drawing on a terminal (``ui/kit``). docs/architecture.md counts
its walk of a plan in the same way.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import joulery

SOURCE = str(Path(joulery.__file__).parent) + "/"
LEFT_OUT = (
    *("domain/", "config/", "perf/catalog/", "ui/kit/"),
    *(
        "__init__",
        "extras",
        "ui/cli/__init__",
        "ui/cli/options",
        "ui/cli/native_output",
        "ui/cli/streams",
        "ui/cli/verbs",
    ),
)


def crossed(run: Callable[[], object]) -> Counter[str]:
    """Count the calls by module while ``run`` runs in this thread, in order of each module's first call."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(SOURCE):
            calls[code.co_filename[len(SOURCE) : -len(".py")]] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return Counter({name: count for name, count in calls.items() if not name.startswith(LEFT_OUT)})


def main(arguments: Sequence[str]) -> int:
    """Run a command twice, because the first run imports modules, and print the modules that the second run calls."""
    from joulery.ui.cli import main as joulery_main

    code = joulery_main(arguments)
    calls = crossed(lambda: joulery_main(arguments))
    for name, count in calls.items():
        sys.stdout.write(f"{count:>10,}  {name}\n")
    sys.stdout.write(f"{len(calls)} modules\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
