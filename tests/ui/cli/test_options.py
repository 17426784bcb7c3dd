import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from joulery.domain.errors import ConfigError
from joulery.domain.renames import RenamedWarning
from joulery.ui import cli
from joulery.ui.cli import main
from joulery.ui.cli.options import chosen_format, option
from joulery.ui.cli.verbs import JOURNEYS, VERBS
from tests.config.site_text import SITE, written


@click.command()
@option("--samples", "-n", "samples", old="--draws", type=click.IntRange(1), default=7, help="How many.")
@option("--max-migrations", old="--moves", multiple=True, help="Which.")
@option("--fast", old="--quick", is_flag=True)
def command(samples, max_migrations, fast):
    click.echo(f"{samples} {max_migrations} {fast}")


def run(*arguments):
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_the_new_name_works_and_says_nothing():
    assert run().output == "7 () False\n"
    assert run("-n", "3", "--max-migrations", "a", "--max-migrations=b", "--fast").output == "3 ('a', 'b') True\n"


def test_the_old_name_is_read_with_one_line_that_names_the_new_one():
    with pytest.warns(RenamedWarning) as caught:
        result = run("--draws", "3", "--moves", "a", "--moves=b", "--quick")
    assert result.stdout == "3 ('a', 'b') True\n"
    lines = sorted(str(one.message) for one in caught)
    assert [line.split()[0] for line in lines] == ["--draws", "--moves", "--quick"]
    assert ["--samples" in lines[0], "--max-migrations" in lines[1], "--fast" in lines[2]] == [True] * 3


@pytest.mark.filterwarnings("ignore::joulery.domain.renames.RenamedWarning")
def test_the_old_name_is_checked_as_the_new_one_is():
    result = run("--draws", "0")
    assert result.exit_code == 2 and "--samples" in result.output


def test_both_names_at_once_are_an_error():
    result = run("--draws", "3", "--samples", "4")
    assert result.exit_code == 2 and "--draws" in result.output and "--samples" in result.output


def test_help_shows_the_new_name_only():
    text = run("--help").output
    assert "--samples" in text and "--draws" not in text and "former" not in text


def test_the_command_line_prints_each_old_name_as_one_line(monkeypatch, capsys, tmp_path):
    from joulery.config.site import Site

    monkeypatch.setattr(Site, "ALIASES", {"manner": "mode"})
    site = written(tmp_path, SITE.replace("mode:", "manner:"))
    from joulery.config.parsing import reading

    reading.schema.cache_clear()
    try:
        Site.model_rebuild(force=True)
        assert main(["config", "check", str(site)]) == 0
    finally:
        monkeypatch.undo()
        Site.model_rebuild(force=True)
        reading.schema.cache_clear()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert all(fact in lines[0] for fact in ("site.yaml:", "manner", "mode"))


def test_help_groups_every_verb_by_journey(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"\n{journey}:\n") for journey in JOURNEYS]
    assert places == sorted(places)
    for verb in VERBS:
        assert f"\n  {verb} " in text
    modules = {path.stem.replace("_", "-") for path in Path(cli.__file__).parent.glob("*.py")}
    assert set(VERBS) <= modules


@pytest.mark.parametrize(("words", "near"), [(["reprot"], "report"), (["report", "r", "--fromat", "csv"], "--format")])
def test_a_mistyped_verb_or_flag_names_the_nearest(capsys, words, near):
    assert main(words) == 2
    assert f"'{near}'" in capsys.readouterr().err


def test_a_verb_like_no_other_points_at_the_list(capsys):
    assert main(["xyzzy"]) == 2
    error = capsys.readouterr().err
    assert "xyzzy" in error and "joulery --help" in error


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ({}, ("text", None)),
        ({"form": "csv", "out": Path("a")}, ("csv", Path("a"))),
        ({"as_json": True, "form": "json"}, ("json", None)),
        ({"html": Path("p.html")}, ("html", Path("p.html"))),
        ({"html": Path("-")}, ("html", None)),
    ],
)
def test_the_output_format_is_chosen_by_its_flags(flags, chosen):
    assert chosen_format(**{"form": None, "as_json": False, "html": None, "out": None, **flags}) == chosen


@pytest.mark.parametrize(
    "flags",
    [
        {"form": "csv", "as_json": True},
        {"form": "csv", "html": Path("p")},
        {"as_json": True, "html": Path("p")},
        {"out": Path("o"), "html": Path("p")},
    ],
)
def test_flags_that_contradict_one_another_are_an_error(flags):
    with pytest.raises(ConfigError):
        chosen_format(**{"form": None, "as_json": False, "html": None, "out": None, **flags})


def test_format_html_is_the_old_name_of_html():
    with pytest.warns(RenamedWarning, match="--html"):
        assert chosen_format("html", as_json=False, html=None, out=Path("o")) == ("html", Path("o"))


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["report", "--json"], "usage", "Missing argument"),
        (["repotr", "--json"], "usage", "Did you mean 'report'?"),
        (["when", "--json", "--nonsense"], "usage", "No such option"),
        (["measure", "--json", "--", "no-such-command"], "capability", "no-such-command: command not found"),
    ],
)
def test_every_error_is_one_json_object_where_json_is_asked_for(capsys, words, kind, says):
    assert main(words) in (2, 127)
    out, err = capsys.readouterr()
    error = json.loads(err)["error"]
    assert out == "" and error["kind"] == kind and says in error["message"]


def test_json_behind_two_dashes_is_the_other_programs(capsys):
    assert main(["measure", "--pue", "0.3", "--", "prog", "--json"]) == 2
    assert capsys.readouterr().err.startswith("joulery: ")
