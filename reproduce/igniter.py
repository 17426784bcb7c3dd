"""``python -m reproduce igniter``: the plans of iGniter (Xu et al., TPDS 34(3)) on the published V100 coefficients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from reproduce.claim import PARTLY, Claim, json_option, print_claims, verdict
from reproduce.product import EXAMPLES, joulery_json

_SHARES = {"A": 0.1, "R": 0.3, "V": 0.375}
"""Table 1: shares of one V100."""
_PLANS: Mapping[str, tuple[str, int, int]] = {
    "igniter": ("Table 2, Fig. 14", 6, 0),
    "ffd": ("Fig. 14", 5, 10),
    "gpulets": ("Fig. 14", 8, 3),
    "gslice": ("Fig. 14", 6, 3),
}
"""By preset: the table or figure with the plan of the 12 services, its GPUs and its violations."""


@click.command("igniter")
@json_option
def command(as_json: bool) -> None:
    """Plan iGniter's examples: shares of Table 1, the 12 services under every strategy. Plans are predicted."""
    found = [*_three(), *_twelve(), *_better()]
    document = {"paper": "igniter", "quality": "predicted"}
    notes = ("Plans are predicted on the published V100 coefficients; no GPU is used.",)
    print_claims(found, document, as_json=as_json, notes=notes)


def _plan(example: str, *flags: str) -> dict[str, Any]:
    return joulery_json("plan", str(EXAMPLES / example), *flags)


def _three() -> list[Claim]:
    plan = _plan("igniter-3.yaml", "--preset", "igniter")
    shares = {one["workload"]: one["share_ratio"] for gpu in plan["gpus"] for one in gpu["instances"]}
    same = len(plan["gpus"]) == 1 and all(abs(shares[name] - share) < 1e-9 for name, share in _SHARES.items())
    return [Claim("Table 1", "shares of one V100: A, R, V", _shares(_SHARES), _shares(shares), verdict(same))]


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{100 * shares[name]:g} %" for name in sorted(shares))


def _twelve() -> list[Claim]:
    found = []
    for preset, (figure, gpus, violations) in _PLANS.items():
        plan = _plan("igniter-12.yaml", "--preset", preset)
        ours = len(plan["gpus"]), len(plan["violations"])
        same = ours == (gpus, violations)
        judged = verdict(same) if preset == "igniter" or same else PARTLY
        what = f"12 services under {preset}: GPUs, predicted violations"
        found.append(Claim(figure, what, f"{gpus}, {violations}", f"{ours[0]}, {ours[1]}", judged))
        if preset == "igniter":
            usd = plan["cost_usd_per_hour"]
            found.append(Claim(figure, "its cost", "$18.36/h", f"${usd:.2f}/h", verdict(abs(usd - 18.36) < 0.005)))
    return found


def _better() -> list[Claim]:
    plan = _plan("igniter-12.yaml")
    text = f"{len(plan['gpus'])} GPUs, ${plan['cost_usd_per_hour']:.2f}/h, {len(plan['violations'])} violations"
    proof = "optimal" if plan["optimal"] else f"within {100 * plan['gap_ratio']:.1f} % of the bound"
    return [Claim("", "joulery's own planner (best), replicas allowed", "", f"{text}, {proof}", "")]
