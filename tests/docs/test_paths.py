"""Files of the source that pages name exist."""

import re

import pytest

from tests.house.syntax import ROOT

SOURCE = ROOT / "src" / "joulery"
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if path.name != "CHANGELOG.md")
ROOMS = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists())
OUTSIDE = r"(?<![\w/.-])(?:src/joulery|tests|benchmarks|reproduce|scripts|examples|tools)/[\w/-]+\.(?:py|yaml|ipynb)"
INSIDE = rf"`((?:{'|'.join(ROOMS)})/[\w/]+)(?:\.py)?`"


def missing(text: str) -> list[str]:
    """Paths that a text names and that do not exist: from the root, or as ``policies/training/green``."""
    inside = (SOURCE / name for name in re.findall(INSIDE, text))
    named = [ROOT / name for name in re.findall(OUTSIDE, text)]
    return [
        str(path.relative_to(ROOT))
        for path in (*named, *inside)
        if not path.exists() and not path.with_suffix(".py").exists()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


def test_a_missing_file_is_found() -> None:
    text = "`policies/training/green`, `policies/training/gone.py`, benchmarks/gone.py, see docs/examples/gone.yaml"
    assert missing(text) == ["benchmarks/gone.py", "src/joulery/policies/training/gone"]
