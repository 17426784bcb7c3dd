"""Prints counts of a source tree, as docs/architecture.md shows them: ``python -m scripts.house_counts [TREE]``.

Private words are those that ``tests/house/test_language.py`` lists, with its exceptions: terms of other systems,
prompts for language models, and old names that are still read.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.house.test_language import PLACES, RENAMED, TECHNICAL, WORDS

HERE = Path(__file__).resolve().parents[1]
LONGEST = 60
SUFFIXES = (".py", ".md", ".yaml", ".js", ".css", ".html")


def counts(tree: Path) -> dict[str, int]:
    """Count the files, lines, repeated class names, long functions and private words of a clone."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((tree / "src").rglob("*.py"))}
    parsed = [ast.parse(text) for text in texts.values()]
    classes = Counter(
        node.name
        for module in parsed
        for node in module.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in parsed
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        "Python files shipped (`src`)": len(texts),
        "lines shipped": sum(text.count("\n") for text in texts.values()),
        "public class names defined more than once": sum(count > 1 for count in classes.values()),
        f"functions above {LONGEST} lines": sum(length > LONGEST for length in lengths),
        "private words left (source, tests, docs, examples, README)": words(tree),
    }


def words(tree: Path) -> int:
    """Count the private words in the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", *PLACES], cwd=tree, capture_output=True, text=True, check=True).stdout
    found = 0
    for name in listed.splitlines():
        path = tree / name
        skipped = name in RENAMED or "uplot" in name or name == "tests/house/test_language.py"
        if not skipped and path.suffix in SUFFIXES and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            found += sum(len(re.findall(WORDS, TECHNICAL.sub("", line))) for line in lines)
    return found


if __name__ == "__main__":
    for what, count in counts(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE).items():
        sys.stdout.write(f"{count:>9,}  {what}\n")
