from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Field, TypeAdapter

from joulery.config.parsing.quantity import Seconds
from joulery.config.parsing.reading import Document, check_document, load_document
from joulery.config.parsing.section import Section
from joulery.domain.errors import ConfigError
from joulery.domain.renames import RenamedWarning


class Engine(Section):
    ALIASES: ClassVar = {"lanes": "max_num_seqs"}
    kind: Literal["embedded"] = "embedded"
    max_num_seqs: int = 8


class Other(Section):
    kind: Literal["other"]
    lanes: int = 1


class Load(Section):
    ALIASES: ClassVar = {"lasts": "duration"}
    duration_s: Seconds = Field(alias="duration")


class Page(Section):
    ALIASES: ClassVar = {"motors": "engines"}
    engines: tuple[Annotated[Engine | Other, Field(discriminator="kind")], ...] = ()
    by_name: dict[str, Load] = Field(default_factory=dict)
    load: Load | None = None


PAGE = Document("a page", "load:", TypeAdapter(Page), lambda: Page.model_json_schema(by_alias=True))


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "page.yaml"
        path.write_text(text)
        return path

    return write


OLD = """
motors:
  - kind: embedded
    lanes: 3
  - {kind: other, lanes: 4}
by_name: {a: {lasts: 2 s}}
load:
  lasts: 5 s
"""


def test_old_keys_are_read_under_their_new_names_with_file_and_line(file):
    with pytest.warns(RenamedWarning) as caught:
        page = load_document(file(OLD), PAGE)
    assert page.engines == (Engine(max_num_seqs=3), Other(kind="other", lanes=4))
    assert page.load.duration_s == 5.0 and page.by_name["a"].duration_s == 2.0
    lines = [str(one.message) for one in caught]
    assert len(lines) == 4
    for line, facts in zip(
        lines,
        (
            ("page.yaml:2 motors:", "engines"),
            ("page.yaml:4 motors.0.lanes:", "max_num_seqs"),
            ("page.yaml:6 by_name.a.lasts:", "duration"),
            ("page.yaml:8 load.lasts:", "duration"),
        ),
        strict=True,
    ):
        assert all(fact in line for fact in facts), line


@pytest.mark.filterwarnings("ignore::joulery.domain.renames.RenamedWarning")
def test_an_error_below_an_old_key_names_the_line_in_the_file(file):
    page, errors = check_document(file(OLD.replace("lanes: 3", "lanes: many")), PAGE)
    assert page is None
    assert [(error.line, error.pointer, error.got) for error in errors] == [(4, "engines.0.max_num_seqs", "'many'")]


def test_old_and_new_name_in_one_section_are_an_error(file):
    with pytest.raises(ConfigError, match=r"lanes.*max_num_seqs") as caught:
        load_document(file("engines:\n  - {kind: embedded, lanes: 3, max_num_seqs: 4}"), PAGE)
    assert caught.value.line == 2


def test_a_section_without_the_alias_still_refuses_the_key(file):
    _, errors = check_document(file("load: {duration: 1 s}\nengines: [{kind: other, max_num_seqs: 4}]"), PAGE)
    assert [error.pointer for error in errors] == ["engines.0.max_num_seqs"]
