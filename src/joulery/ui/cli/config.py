"""``joulery config``: check, explain and print the site file."""

from __future__ import annotations

import json
from typing import Any

import click

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
site_file = click.argument("file", type=click.Path())


@click.group("config")
def command() -> None:
    """Check a site file, print it with its defaults, or print the schema."""


@command.command()
@site_file
@as_json
def check(file: str, as_json: bool) -> None:
    """Check FILE and list every error in it."""
    from joulery.config import check as check_site

    site, errors = check_site(file)
    if as_json:
        click.echo(json.dumps({"file": file, "valid": site is not None, "errors": [e.as_dict() for e in errors]}))
    elif site is None:
        for error in errors:
            click.echo(str(error), err=True)
            if error.hint:
                click.echo(f"  {error.hint}", err=True)
    else:
        names = [one.name for one in site.services] + [model.name for model in site.language_models]
        served = ", ".join(names) or "no service"
        click.echo(f"{file}: valid; {served}; mode {site.mode}")
    if errors:
        raise click.exceptions.Exit(errors[0].exit_code)


@command.command()
@site_file
@as_json
def show(file: str, as_json: bool) -> None:
    """Print FILE with all defaults, in SI units, secrets masked."""
    import yaml

    from joulery.config import load

    data: dict[str, Any] = load(file).model_dump(mode="json")
    click.echo(
        json.dumps(data, indent=2) if as_json else yaml.safe_dump(data, sort_keys=False, allow_unicode=True).rstrip()
    )


@command.command()
@as_json
def schema(as_json: bool) -> None:
    """Print the JSON schema of a site file."""
    from joulery.config import schema as site_schema

    click.echo(json.dumps(site_schema(), indent=None if as_json else 2))
