"""``joulery doctor``: check what can be read and set on this machine, and how to grant the rest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from joulery.app.wiring.leases import LeaseStatus

_MARKS = {"ok": ("✓", "green"), "partly": ("~", "yellow"), "denied": ("!", "red"), "absent": ("–", None)}
_AREAS = {
    "energy": "Energy: what measures it",
    "share": "Share: energy by process",
    "settings": "Settings: what can be changed",
    "carbon": "Carbon: where the intensity comes from",
    "slurm": "Slurm: rights of this user",
    "kueue": "Kueue: rights of this user",
}


@click.command("doctor")
@click.option("--reset", is_flag=True, help="Set every leased setting (clocks, partitions) back.")
@click.option("--guard", is_flag=True, help="Revert leased settings of ended containers and processes until stopped.")
@click.option("--slurm", "with_slurm", is_flag=True, help="Test the rights in Slurm with a held job, then cancel it.")
@click.option("--kueue", "with_kueue", is_flag=True, help="Ask Kubernetes for this user's rights in Kueue.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(reset: bool, guard: bool, with_slurm: bool, with_kueue: bool, as_json: bool) -> None:
    """Check what joulery can read and set on this machine, what is missing, and the exact line that grants it.

    Without --reset, --guard, --slurm and --kueue nothing is changed, and no network is touched. Settings of a
    controller are leased and listed; each reverts when its controller stops or dies. A container's controllers need
    --guard outside of the container, over the same folder (/var/lib/joulery).
    """
    from dataclasses import asdict

    from joulery.app.doctor import examine, kueue, machine_text, slurm
    from joulery.app.wiring.leases import lease_statuses

    if reset and guard:
        raise click.UsageError("--reset and --guard exclude each other")
    if reset or guard:
        _guard() if guard else _reset(as_json)
        return
    asked = (*(slurm() if with_slurm else ()), *(kueue() if with_kueue else ()))
    machine, found = machine_text(), (*examine(), *asked)
    if as_json:
        checks = [asdict(check) for check in found]
        leases = [lease.as_dict() for lease in lease_statuses()]
        document = {"schema": "joulery.doctor/1", "machine": machine, "checks": checks, "leases": leases}
        click.echo(json.dumps(document, indent=2))
        return
    virtual = " (virtual)" if machine["virtual"] == "yes" else ""
    click.echo(f"{machine['cpus']} CPUs, {machine['processor']}{virtual}; {machine['system']}")
    area = ""
    for check in found:
        if check.area != area:
            area = check.area
            click.secho(f"\n{_AREAS[area]}", bold=True)
        mark, colour = _MARKS[check.status]
        click.echo(f"  {click.style(mark, fg=colour)} {check.name}: {check.detail}")
        if check.advice:
            click.secho(f"      {check.advice}", dim=True)
        if check.grant:
            click.echo(f"      to enable it: {click.style(check.grant, bold=True)}")
    _show_leases(lease_statuses())
    click.echo("\n✓ works   ~ works in part   ! present, not permitted   – absent")


def _show_leases(found: tuple[LeaseStatus, ...]) -> None:
    """Print the leased settings, if there are any."""
    if not found:
        return
    click.secho("\nLeases: settings that will be reverted", bold=True)
    for lease in found:
        colour = None if lease.state == "held" else "yellow"
        click.echo(f"  {click.style(lease.state, fg=colour)} {lease.detail}")
    if any(lease.state != "held" for lease in found):
        click.echo(f"      to revert it: {click.style('joulery doctor --reset', bold=True)}")


def _guard() -> None:
    """Guard leases until a signal ends the process."""
    import signal
    import threading

    from joulery.app.wiring.leases import guard_leases
    from joulery.store.leases import LeaseBook

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    book = LeaseBook()
    click.echo(f"guarding the leases in {book.folder}")
    guard_leases(stop.wait, book)


def _reset(as_json: bool) -> None:
    """Revert all leases."""
    from joulery.app.wiring.leases import reset_everything

    reverted = reset_everything()
    if as_json:
        click.echo(json.dumps({"schema": "joulery.doctor/1", "reset": list(reverted)}, indent=2))
        return
    for line in reverted:
        click.echo(line)
    if not reverted:
        click.echo("no setting is leased")
