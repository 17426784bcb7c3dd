import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from scripts.cli_page import OTHER_FORMS

from joulery.domain.errors import ConfigError
from joulery.domain.renames import RenamedWarning
from joulery.ui import cli
from joulery.ui.cli import main
from joulery.ui.cli.options import KeyList, Time, TimeList, chosen_format, option
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


@pytest.mark.parametrize(
    ("kind", "text", "seconds"),
    [
        (Time(), "80 ms", 0.08),
        (Time(), " 5min ", 300.0),
        (Time(), "1.5h", 5400.0),
        (Time(), "30d", 30 * 86_400.0),
        (Time(bare="s"), "30", 30.0),
        (Time(bare="s"), "1e-3", 0.001),
        (Time(bare="s"), "2 min", 120.0),
        (Time(bare="s", zero=True), "0", 0.0),
        (Time(bare="s", zero=True), "0 s", 0.0),
        (TimeList("6 ms", bare="ms"), "6, 12 ms,1 s", (0.006, 0.012, 1.0)),
    ],
)
def test_a_time_has_a_unit_or_the_flags_own(kind, text, seconds):
    assert kind.convert(text, None, None) == seconds


@pytest.mark.parametrize(
    ("kind", "text", "facts"),
    [
        (Time("4 h"), "4", ("needs a unit", "got '4'", "such as 4 h", "4 s, 4 min or 4 h")),
        (Time("4 ms"), "4", ("needs a unit", "such as 4 ms", "4 ms or 4 s")),
        (Time("4 h"), "0 s", ("above 0", "got '0 s'", "such as 4 h")),
        (Time(bare="s"), "-3", ("above 0", "got '-3'", "such as 30 s")),
        (Time(bare="s"), "x", ("is not a time", "got 'x'")),
        (Time(bare="s"), "3 W", ("is a power", "got '3 W'")),
        (Time(bare="s"), "3 sec", ("unknown unit 'sec'", "min, h, d")),
        (Time(bare="s", zero=True), "-1 s", ("at least 0", "got '-1 s'")),
        (Time(bare="s"), "inf", ("finite", "got 'inf'")),
        (TimeList("6 ms", bare="ms"), "6,,12", ("is not a time", "such as 6 ms")),
    ],
)
def test_what_is_no_time_names_the_flag_what_was_given_and_what_would_do(kind, text, facts):
    with pytest.raises(ConfigError) as caught:
        kind.convert(text, click.Option(["--wait"]), None)
    said = f"{caught.value} {caught.value.hint}"
    assert caught.value.pointer == "--wait"
    assert [fact for fact in facts if fact not in said] == []


def options_of_all_verbs():
    context = click.Context(cli.cli)
    for verb in cli.cli.list_commands(context):
        first = cli.cli.get_command(context, verb)
        below = list(getattr(first, "commands", {}).values())
        for one in (first, *below, *(form for _, form in OTHER_FORMS.get(verb, ()))):
            yield from ((verb, parameter) for parameter in one.params if isinstance(parameter, click.Option))


def test_every_flag_in_seconds_takes_units():
    found = {(verb, max(flag.opts, key=len)) for verb, flag in options_of_all_verbs() if isinstance(flag.type, Time)}
    for expected in (
        *(("measure", "--period"), ("monitor", "--period"), ("account", "--period"), ("export", "--period")),
        *(("agent", "--period"), ("export", "--engine-interval"), ("when", "--within"), ("up", "--duration")),
        *(("serve", "--deadline"), ("serve", "--drain"), ("gateway", "--give-up"), ("plan", "--limit")),
        *(("report", "--since"), ("submit", "--time"), ("profile", "--seconds"), ("profile", "--launch")),
    ):
        assert expected in found
    for verb, flag in options_of_all_verbs():
        if (flag.name or "").endswith(("_s", "seconds")):
            assert isinstance(flag.type, Time | TimeList), (verb, flag.opts)


@pytest.mark.parametrize(
    ("words", "old", "new"),
    [
        (["export", "--sample", "1 W"], "--sample", "--period"),
        (["agent", "site.yaml", "--sample", "1 W"], "--sample", "--period"),
        (["profile", "--output", "o.json"], "--output", "--out"),
    ],
)
def test_former_flags_are_read_under_their_new_name(words, old, new, capsys):
    assert main(words) == 2
    remark = [line for line in capsys.readouterr().err.splitlines() if f"{old} is now called {new};" in line]
    assert len(remark) == 1


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


def test_every_flag_that_takes_one_of_some_names_suggests_the_nearest():
    choices = [(verb, flag) for verb, flag in options_of_all_verbs() if isinstance(flag.type, click.Choice)]
    assert {("report", "--by"), ("plan", "--preset"), ("ledger", "--by"), ("schedule", "--mode")} <= {
        (verb, max(flag.opts, key=len)) for verb, flag in choices
    }
    for verb, flag in choices:
        name = max(flag.type.choices, key=len)
        with pytest.raises(click.BadParameter, match=f"Did you mean '{name}'"):
            flag.type.convert(f"{name}s", flag, None)
        assert flag.type.convert(name, flag, None) == name, (verb, flag.opts)


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


def test_a_comma_at_the_end_of_a_list_of_names_is_no_name():
    names = KeyList(("month", "owner"))
    assert names.convert("month,owner,", None, None) == "month,owner"
    for text in ("", ",", "month,,owner", ",month"):
        with pytest.raises(click.UsageError, match="is not one of"):
            names.convert(text, None, None)
