"""The vocabulary: private words have a plain one (docs/contributing lists them); what remains may only shrink."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
}
"""Word not to use: word to use."""
WORDS = re.compile(rf"\b({'|'.join(PLAIN)})\b", re.IGNORECASE)
TECHNICAL = re.compile(
    r"kube\w*|Kubernetes'? pods?|pods? of Kubernetes|Alibaba's pods"
    r"|ALIASES.*|old=.*|warn_renamed\(.*|\bold: .*|`\w+` → .*",
    re.IGNORECASE,
)
"""Terms of other systems, and the old names that are still read."""
CEILINGS = {"src": 189, "docs": 13, "examples": 0, "README.md": 0, "reproduce": 0, "tests": 2}
"""Uses left in a folder; may only shrink. Those in tests are a former key and a key of stored documents."""


def uses(place: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", place], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in listed.splitlines():
        path = ROOT / name
        if (
            path == Path(__file__)
            or path.suffix not in (".py", ".md", ".yaml", ".js", ".css", ".html")
            or "uplot" in name
            or not path.exists()
        ):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{name}:{number}: {word}" for word in WORDS.findall(TECHNICAL.sub("", line))]
    return found


@pytest.mark.parametrize("place", CEILINGS)
def test_private_words_do_not_come_back(place: str) -> None:
    found = uses(place)
    assert len(found) <= CEILINGS[place], "\n".join(found)
