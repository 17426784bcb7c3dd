"""The preset of a site that names none: joint where the site says what watts, grams or dollars are to be least.

Fewest GPUs (preset best) is the cheapest fleet in rent, and joint plans often have more GPUs at lower clocks, so the
default depends on what the site asks for, and the plan says so in its first line. A site that names its preset, and one
that states nothing which joint alone reads, is planned as ever.
"""

from __future__ import annotations

from typing import NamedTuple

from joulery.config.site import Site

BEST, JOINT_PRESET, LANGUAGE_PRESET = "best", "joint", "language"


class ChosenPreset(NamedTuple):
    """A preset.

    Attributes:
        name: The preset.
        why: Why joulery chose it, in words; empty where the user did, or where it is the default.
    """

    name: str
    why: str = ""


def chosen_preset(
    site: Site, stated: str | None = None, objective: str | None = None, *, shares: bool = False
) -> ChosenPreset:
    """The preset to plan a site with.

    Args:
        site: The site.
        stated: The preset that the command names; None for none.
        objective: The objective that the command names; None for the site's.
        shares: Whether the command asks for what presets of shares alone can do.
    """
    if stated is not None:
        return ChosenPreset(stated)
    if site.plan.language is not None and not site.services:
        return ChosenPreset(LANGUAGE_PRESET)
    if "preset" in site.plan.model_fields_set or site.plan.pipelines is not None:
        return ChosenPreset(site.plan.preset)
    why = "" if shares else _wanted(site, objective)
    if not why:
        return ChosenPreset(site.plan.preset)
    return ChosenPreset(JOINT_PRESET, f"preset joint, because {why}; --preset best for fewest GPUs")


def _wanted(site: Site, objective: str | None) -> str:
    """What of the site, or of the command, asks for preset joint; empty for nothing."""
    if not site.services or not site.fleet.gpus:
        return ""
    plan, choice = site.plan, any(service.variants for service in site.services)
    if choice:
        return "services list variants"
    if any(gpu.measurements is not None for gpu in site.fleet.gpus):
        return "fleet.gpus has measurements of slices"
    known = objective or (plan.objective if "objective" in plan.model_fields_set else None)
    if known is not None:
        source = "--objective" if objective is not None else "plan.objective"
        return "" if known == "cost" else f"{source} is {known}"  # in dollars nothing beats preset best
    if plan.power_cap_w is not None:
        return "plan.power_cap is stated"
    if any(gpu.host_w > 0 for gpu in site.fleet.gpus):
        return "fleet.gpus states host watts"
    return ""
