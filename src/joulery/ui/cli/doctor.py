"""``joulery doctor``: what can be read and set here, what is missing, and the line that grants it."""

from __future__ import annotations

import json

import click

_MARKS = {"ok": ("✓", "green"), "partly": ("~", "yellow"), "denied": ("!", "red"), "absent": ("–", None)}
_AREAS = {
    "energy": "Energy: what measures it",
    "share": "Share: whose energy it is",
    "settings": "Settings: what can be changed",
    "carbon": "Carbon: where the intensity comes from",
}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(as_json: bool) -> None:
    """Say what joulery can read and set on this machine, what is missing, and the exact line that grants it.

    Nothing is changed and no network is touched.
    """
    from dataclasses import asdict

    from joulery.runtime.compose.doctor import examine, machine_in_words

    machine = machine_in_words()
    if as_json:
        checks = [asdict(check) for check in examine()]
        click.echo(json.dumps({"schema": "joulery.doctor/1", "machine": machine, "checks": checks}, indent=2))
        return
    virtual = " (virtual)" if machine["virtual"] == "yes" else ""
    click.echo(f"{machine['cpus']} CPUs, {machine['processor']}{virtual}; {machine['system']}")
    area = ""
    for check in examine():
        if check.area != area:
            area = check.area
            click.secho(f"\n{_AREAS[area]}", bold=True)
        mark, colour = _MARKS[check.status]
        click.echo(f"  {click.style(mark, fg=colour)} {check.name}: {check.detail}")
        if check.advice:
            click.secho(f"      {check.advice}", dim=True)
        if check.grant:
            click.echo(f"      to have it: {click.style(check.grant, bold=True)}")
    click.echo("\n✓ works   ~ works with less than there could be   ! here, not permitted   – not here")
