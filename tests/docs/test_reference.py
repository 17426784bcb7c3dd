"""Pages written from the code are current, and the navigation lists every page."""

import pydoc
import re
from pathlib import Path

import click
import pytest
from scripts import cli_page
from scripts.reference_pages import written

import joulery

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(("file", "text"), written().items(), ids=lambda each: getattr(each, "name", ""))
def test_a_page_from_the_code_is_current(file: Path, text: str) -> None:
    assert file.read_text() == text, "run: python -m scripts.reference_pages"


def test_every_option_of_every_verb_is_on_the_command_line_page():
    text = cli_page.PAGE.read_text()
    context = click.Context(cli_page.cli)
    for verb in cli_page.cli.list_commands(context):
        command = cli_page.cli.get_command(context, verb)
        assert f"### joulery {verb}\n" in text
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0] in text, f"{verb} {option.opts[0]}"


def test_examples_in_the_help_of_a_verb_keep_their_lines_on_the_page():
    text = cli_page.PAGE.read_text()
    assert "\b" not in text
    assert "\n```text\njoulery serve site.yaml\njoulery serve --model double=shop.models:double\n" in text


def test_the_navigation_lists_every_page_once():
    listed = re.findall(r": ([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_public_name_is_on_the_python_page():
    text = (DOCS / "reference" / "python.md").read_text()
    for name in set(joulery.__all__) - {"__version__"}:
        assert f"::: joulery.{name}\n" in text or name in ("JouleryError", "Step"), name  # in whole modules below


@pytest.mark.parametrize(
    "path", re.findall(r"^::: ([\w.]+)$", (DOCS / "reference" / "python.md").read_text(), re.MULTILINE)
)
def test_every_name_on_the_python_page_exists(path: str):
    try:
        assert pydoc.locate(path) is not None
    except ModuleNotFoundError as error:
        assert error.name is not None and not error.name.startswith("joulery")
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_the_files_that_a_page_outside_the_site_links_to_exist(page: str) -> None:
    text = (DOCS.parent / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert (DOCS.parent / target).exists(), target
