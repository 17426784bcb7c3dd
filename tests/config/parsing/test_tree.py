import math

import pytest

from joulery.config.parsing.tree import MAX_BYTES, MAX_DEPTH, parse_yaml
from joulery.domain.errors import ConfigError


def data(text):
    return parse_yaml(text, "f").data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("NO", "NO"),
        ("yes", "yes"),
        ("22:30", "22:30"),
        ("2020-01-01", "2020-01-01"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("12", 12),
        ("-7", -7),
        ("012", 12),
        ("0x1f", "0x1f"),
        ("1e3", 1000.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("'12'", "12"),
        ('"true"', "true"),
        ("12345678901234567890", 12345678901234567890.0),
    ],
)
def test_scalars_follow_the_core_schema(text, value):
    result = data(f"k: {text}")["k"]
    assert result == value
    assert type(result) is type(value)


def test_nan_is_read_so_that_validation_can_refuse_it():
    assert math.isnan(data("k: .NaN")["k"])


def test_lines_are_those_of_keys_and_items():
    tree = parse_yaml("a: 1\n# comment\nb:\n  - x\n  -\n    c: 3\n", "f")
    assert tree.data == {"a": 1, "b": ["x", {"c": 3}]}
    assert tree.lines == {(): 1, ("a",): 1, ("b",): 3, ("b", 0): 4, ("b", 1): 6, ("b", 1, "c"): 6}
    assert tree.texts == {("a",): "1", ("b", 0): "x", ("b", 1, "c"): "3"}


def test_a_path_that_does_not_exist_has_the_line_of_what_does():
    tree = parse_yaml("a:\n  b: {c: 1}", "f")
    assert tree.line(("a", "b", "x", "y")) == 2
    assert tree.line(("a", "b", "x")) == 2
    assert tree.line(("z",)) == 1


def test_the_size_limit_itself_is_accepted():
    assert data("k: " + "a" * (MAX_BYTES - 3))["k"].startswith("aaa")


def test_aliases_are_followed():
    assert data("a: &x {b: 1}\nc: *x") == {"a": {"b": 1}, "c": {"b": 1}}


def nested(levels):
    return "[" * levels + "]" * levels


def bomb(levels=9):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "the file is empty"),
        ("# only a comment\n", None, "the file is empty"),
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a', first on line 1"),
        ("a: 1\n---\nb: 2\n", 2, "only one document is allowed in a file"),
        ("a: !!python/object:os.system x", 1, "tags are not allowed: tag:yaml.org,2002:python/object:os.system"),
        ("a: !mine x", 1, "tags are not allowed: !mine"),
        ("a: *nowhere", 1, "alias *nowhere names no earlier anchor"),
        ("a: &a [*a]", 1, "alias *a names no earlier anchor"),
        ("? [1]\n: 2", 1, "a key must be plain text"),
        ("x: &x {a: 1}\ny:\n  <<: *x", 3, "merging with << is not supported"),
        ("a: [1, 2", 1, "not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n\tb: 2", 2, "not valid YAML: found character '\\t' that cannot start any token"),
        ('a: "\\ud800"', 1, "half of a surrogate pair is not a character"),
        ('a: "\\UFFFFFFFF"', None, "not valid YAML"),
        ("a: 1\nb: \x07", 2, "control character U+0007"),
        (f"a: {nested(MAX_DEPTH + 1)}", 1, f"nested deeper than {MAX_DEPTH} levels"),
        (nested(100_000), 1, f"nested deeper than {MAX_DEPTH} levels"),
        (bomb(), 1, "more than 20000 values once aliases are expanded"),
        ("a" * (MAX_BYTES + 1), None, "the file is longer than 1 MiB"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused_and_where(text, line, message):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f")
    assert caught.value.message.startswith(message)
    assert (caught.value.file, caught.value.line) == ("f", line)


def test_the_depth_limit_itself_is_accepted():
    assert data(nested(MAX_DEPTH)) is not None


def test_a_long_chain_of_aliases_is_refused_before_the_stack_ends():
    chain = "a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 3000))
    with pytest.raises(ConfigError, match="nested deeper"):
        parse_yaml(chain, "f")
