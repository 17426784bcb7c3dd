"""Run golden case files: ``python tests/golden/run_cases.py FILE…``.

Each file is recognised by its keys (tests/golden/kinds). The last line reads ``N passed, N failed``; the exit code is 1
when anything failed. A file that cannot be read, or is of an unknown kind, counts as one failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from joulery.domain.errors import JouleryError
from tests.golden.kinds import Case, kinds

FAILURES = (JouleryError, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def main(files: Sequence[str]) -> int:
    """Run the files, say what failed, count."""
    passed = failed = 0
    for file in files:
        try:
            cases = list(cases_of(Path(file)))
        except (OSError, *FAILURES) as error:
            print(f"FAILED {file}: {error or type(error).__name__}")
            failed += 1
            continue
        for case in cases:
            difference = outcome(case)
            if difference is None:
                passed += 1
            else:
                failed += 1
                print(f"FAILED {file}: {case.name}: {difference}")
    if not files:
        print("FAILED: name at least one case file")
        failed = 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def cases_of(file: Path) -> Iterable[Case]:
    """The cases of a file.

    Raises:
        ValueError: It is not JSON, no kind recognises it, or it holds no case.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"not a JSON file: {error}") from error
    known = kinds()
    for kind in known:
        if kind.recognises(document):
            cases = list(kind.cases(document))
            if not cases:
                raise ValueError(f"a {kind.name} file without a single case")
            return cases
    keys = ", ".join(sorted(map(str, document))) if isinstance(document, dict) else type(document).__name__
    raise ValueError(f"no kind of case file has these keys: {keys} (known: {', '.join(k.name for k in known)})")


def outcome(case: Case) -> str | None:
    """None when the case passes, else what is wrong."""
    try:
        return case.check()
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
