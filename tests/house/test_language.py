"""The vocabulary: private words and names have a plain one and do not come back."""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.house.syntax import ROOT, files_in, nodes_of, text_of

PLAIN = {
    r"yardsticks?": "baseline",
    r"promise[sd]?": "SLO, or within the SLO",
    r"on loan|loans?|lent": "leased, lease",
    r"pods?": "GPU group",
    r"foretold|told|tells": "predicted; reports; names",
    r"guessed": "predicted",
    r"whoever|whosoever|nobody|somebody|whom": "the component that acts",
    r"elders?": "oldest",
    r"strays?|stranded|strand": "orphaned, dropped",
    r"handfuls?": "batch",
    r"seats?": "replica",
    r"thrift|outlook|roused": "budget; prediction; promoted",
    r"foresight": "carbon forecast",
    r"cannot be had": "infeasible",
    r"on its way": "waiting, running",
    r"carbon budget": "trial budget",
    r"working requests?": "running requests",
    r"TextDesk|ServiceEye|TrialTurn|WorkClock": "LLMService, ServiceObserver, TrialArbiter, ProgressClock",
    r"asked_of|in_handfuls|roused_of|start_part|pods_of": "the new function name",
    r"who writes": "the backend, the writer",
}
"""Word not to use: word to use."""
NAMES = (
    *(
        "ServiceEye",
        "Ran",
        "Hosted",
        "Seat",
        "Seats",
        "Chosen",
        "TrialTurn",
        "Resident",
        "WorkClock",
        "Front",
        "TextDesk",
    ),
    *("Told", "Rhythm", "Orders", "Evidence", "Known", "Yardstick", "Outlook", "Thrift", "Steady"),
    *("asked_of", "strays", "drawn", "fold", "course", "elders", "in_handfuls", "words", "strand", "roused_of"),
    *("start_part", "pods_of", "play", "Played", "Course"),
)
"""Class, function and module names that have a plain one."""
ROOMS = {
    r"guess(?:es|ed|er)?": ("src/joulery/runtime/llm/*.py", "predicted, predictor"),
    r"broken": ("src/joulery/policies/**/*.py", "violated"),
}
"""Words with another meaning elsewhere: where they are not used, and the word to use."""
KEYS = ("lanes", "fewest", "elders", "lasts", "cuts", "foresight")
"""Configuration fields that have a plain name."""
WORDS = re.compile(rf"(?<![a-z])({'|'.join(PLAIN)})(?![a-z])", re.IGNORECASE)
TECHNICAL = re.compile(
    r"``pod``|\"pod\".*|kube\w*|Kubernetes'? pods?|pods and nodes in Kubernetes|pods? of Kubernetes|Alibaba's pods"
    r"|^\s+\"(Write|Plan|Explain|Compare|Tell)\b.*\",$|\.get\(\"told\".*"
    r"|promise_broken|promised_ratio|\"elder_\w+\"|kubepods-|-pod[0-9a-f]+_"
    r"|ALIASES.*|old=.*|\"told\"|elders:|warn_renamed\(.*|\bold: .*|`\w+` → .*",
    re.IGNORECASE,
)
"""Terms of other systems, prompts for language models, and the old names that are still read."""
RENAMED = ("docs/reference/renamed.md", "scripts/renamed_page.py")
"""They list the old words."""
QUESTIONS = frozenset(("Have", "How", "What", "Whatever", "When", "Where", "Which", "Who", "Whoever", "Whose", "Why"))
"""First words of docstrings that ask; ``Whether`` may begin a function that returns bool."""
LONGEST_ENTRY = 200
"""Characters of an entry of the changelog."""
BENCHMARKS = "python -m benchmarks"
"""One entry of the changelog may name it: how a project tests itself is no change for its users."""
PLACES = ("src", "tests", "docs", "examples", "benchmarks", "scripts", "reproduce", "README.md")


def uses(place: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", place], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in listed.splitlines():
        path = ROOT / name
        if (
            name in RENAMED
            or path == Path(__file__)
            or path.suffix not in (".py", ".md", ".yaml", ".js", ".css", ".html")
            or "uplot" in name
            or not path.exists()
        ):
            continue
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines() if WORDS.search(text) else (), 1):
            found += [f"{name}:{number}: {word}" for word in WORDS.findall(TECHNICAL.sub("", line))]
    return found


@pytest.mark.parametrize("place", PLACES)
def test_private_words_do_not_come_back(place: str) -> None:
    found = uses(place)
    assert not found, "\n".join(found)


def test_private_names_do_not_come_back() -> None:
    found = []
    for path in (*files_in(ROOT / "src" / "joulery"), *files_in(ROOT / "reproduce")):
        text = text_of(path)
        named = re.findall(rf"^(?:class|(?:async )?def) ({'|'.join(NAMES)})\b", text, re.MULTILINE)
        if path.is_relative_to(ROOT / "src/joulery/config"):
            named += re.findall(rf"^    ({'|'.join(KEYS)}): ", text, re.MULTILINE)
        named += [path.stem] if path.stem in NAMES else []
        found += [f"{path.relative_to(ROOT)}: {name}" for name in named]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", ROOMS)
def test_words_of_other_meanings_stay_out_of_their_rooms(word: str) -> None:
    places, use = ROOMS[word]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in ROOT.glob(places)
        for line in text_of(path).splitlines()
        if re.search(rf"(?<![A-Za-z_]){word}(?![A-Za-z_])", line, re.IGNORECASE) and "ties are broken" not in line
    ]
    assert found == [], f"{use}: {found}"


def riddles(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and first line of each docstring that asks instead of naming: of modules, classes, functions, attributes."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            line = node.value.value.strip().partition("\n")[0]
            if re.split(r"\W", line, maxsplit=1)[0] in QUESTIONS:
                yield node.lineno, line


def test_a_riddle_is_found() -> None:
    source = '''
"""What ran when."""
class Trace:
    """
    Which trace.
    """
    name: str = "Why"
    """How it is called."""
    def _events(self):
        """Whatever ran."""
        return "What"
async def ran():
    """Whether it ran."""
def _device():
    """Howe's device."""
'''
    assert sorted(riddles(ast.walk(ast.parse(source)))) == [
        (2, "What ran when."),
        (4, "Which trace."),
        (8, "How it is called."),
        (10, "Whatever ran."),
    ]


def test_docstrings_name_the_thing() -> None:
    sources = files_in(ROOT / "src" / "joulery")
    found = [f"{path.relative_to(ROOT)}:{at}: {line}" for path in sources for at, line in riddles(nodes_of(path))]
    assert found == [], "begin with what it is, returns or does:\n" + "\n".join(found)


def faults_of(changelog: str) -> Iterator[tuple[int, str]]:
    """Line and fault of each entry in the newest section of a changelog that is not one short sentence for users."""
    inside, benchmarks = False, 0
    for number, line in enumerate(changelog.splitlines(), 1):
        if line.startswith("## "):
            if inside:
                return
            inside = True
        elif inside and not re.fullmatch(r"|### \w+|[A-Z][\w ]*", line):
            benchmarks += BENCHMARKS in line
            if not line.startswith("- "):
                yield number, "is no entry, heading or group: an entry is one line"
            elif len(line) > LONGEST_ENTRY:
                yield number, f"has {len(line)} characters, more than {LONGEST_ENTRY}"
            elif not line.endswith("."):
                yield number, "has no full stop at its end"
            elif BENCHMARKS in line and benchmarks > 1:
                yield number, f"is a further entry that names {BENCHMARKS}"


def test_a_long_winded_entry_is_found() -> None:
    changelog = f"""# Changelog

The format follows a page
of two lines

## [Unreleased]

### Added

Measure and more

- `joulery measure` reports joules.
- `joulery report` prints
  a table.
- `joulery up` has no end
* `joulery plan` has a star.
- {"a" * 197}.
- {"a" * 198}.
- `{BENCHMARKS}` measures the figures.
- `{BENCHMARKS} gpu` runs single parts.

### Fixed

-`joulery jobs` has no space.

## [0.1.0]

- Older
"""
    assert [(number, fault.split(",")[0]) for number, fault in faults_of(changelog)] == [
        (13, "has no full stop at its end"),
        (14, "is no entry"),
        (15, "has no full stop at its end"),
        (16, "is no entry"),
        (18, "has 201 characters"),
        (20, "is a further entry that names python -m benchmarks"),
        (24, "is no entry"),
    ]


def test_entries_of_the_changelog_are_one_short_line() -> None:
    found = [f"CHANGELOG.md:{number} {fault}" for number, fault in faults_of(text_of(ROOT / "CHANGELOG.md"))]
    assert found == [], "\n".join(found)
