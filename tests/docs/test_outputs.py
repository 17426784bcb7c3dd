"""Pages that show what their snippets print show exactly that."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIR = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
MARK = "=== next block ==="


def pages() -> list[Path]:
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if PAIR.search(page.read_text())]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_snippet_prints_what_stands_below_it(page: Path, tmp_path: Path) -> None:
    pairs = PAIR.findall(page.read_text())
    script = f"\nprint({MARK!r})\n".join(code for code, _ in pairs)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{MARK}\n")
    for (code, expected), got in zip(pairs, printed, strict=True):
        assert got == expected, f"{page.name}: this prints something else\n{code}"
