"""docs/reference/site-file.md says what is so."""

import re

import pytest
import yaml
from scripts.site_file_page import PAGE, keys, page

from joulery.config.parsing.quantity import DIMENSIONS
from joulery.config.parsing.reading import load, schema

TEXT = PAGE.read_text()
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_tables_are_current():
    assert page(TEXT) == TEXT, "run: python scripts/site_file_page.py"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text[:20])
def test_every_example_is_a_valid_site(tmp_path, example):
    for name in ("grid.csv", "own.onnx", "token"):
        (tmp_path / name).write_text("")
    (tmp_path / "photos").mkdir()
    (tmp_path / "site.yaml").write_text(example)
    assert load(tmp_path / "site.yaml").joulery == 1


def test_the_complete_example_uses_every_section():
    site = yaml.safe_load(max(EXAMPLES, key=len))
    # `clusters` stands instead of `jobs`, in an example of its own.
    assert set(site) == set(schema()["properties"]) - {"clusters"}
    assert any("clusters" in yaml.safe_load(example) for example in EXAMPLES)


def test_every_key_is_in_the_tables():
    tables = keys()
    for part in (schema(), *schema()["$defs"].values()):
        for key in part.get("properties", {}):
            assert f"| `{key}` |" in tables, key


def test_every_unit_is_in_the_table_of_units():
    for dimension in DIMENSIONS:
        for unit in dimension.factors:
            assert not unit or f"`{unit}`" in TEXT, unit
