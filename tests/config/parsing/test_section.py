"""Texts of keys: read from the source when a schema is made."""

from typing import ClassVar

from joulery.config.parsing.reading import parse, schema
from joulery.config.parsing.section import Section, attribute_docstring, old_keys


class Basic:
    """Not a text of an attribute."""

    plain: int = 1
    described: int = 2
    """In two
    lines."""
    """A second text says nothing."""

    class Inner:
        deep: int = 3
        """Below."""


class Derived(Basic):
    plain: int = 4
    """Its own."""


class WithOldKeys(Section):
    ALIASES: ClassVar = {"an_old_key_of_a_test": "new"}

    new: int = 0


def test_the_text_below_an_attribute_is_that_of_the_class_that_declares_it() -> None:
    assert attribute_docstring(Basic, "described") == attribute_docstring(Derived, "described") == "In two\nlines."
    assert attribute_docstring(Basic, "plain") is None
    assert attribute_docstring(Derived, "plain") == "Its own."
    assert attribute_docstring(Basic.Inner, "deep") == "Below."
    assert attribute_docstring(Basic, "unknown") is None


def test_without_source_there_are_no_texts() -> None:
    made: dict[str, type] = {}
    exec("class Made:\n    x: int = 1\n    'text'\n", {"__name__": "no_such_module"}, made)
    assert attribute_docstring(made["Made"], "x") is None


def test_the_schema_has_texts_and_the_defaults_of_sections() -> None:
    properties = schema()["properties"]
    assert properties["mode"]["description"] == "advise, shadow or act."
    assert properties["fleet"]["default"] == parse("joulery: 1").fleet.model_dump(mode="json")


def test_old_keys_are_those_of_every_section() -> None:
    assert "an_old_key_of_a_test" in old_keys()
    renamed = {key for part in schema()["$defs"].values() for key in part.get("x-renamed", ())}
    assert renamed and renamed <= old_keys()
