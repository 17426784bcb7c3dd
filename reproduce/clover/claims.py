"""The claims of Clover's paper (SC'23, section 5), each with the result of the same comparison in joulery."""

from __future__ import annotations

import math

import numpy as np

from reproduce.claim import Claim
from reproduce.clover.figures import CloverFigures, Mean


def claims(made: CloverFigures) -> tuple[Claim, ...]:
    """Compare every claim that has a number in the paper's text with joulery's figure."""
    return (*_effect(made), *_search(made), *_robust(made))


def _effect(made: CloverFigures) -> list[Claim]:
    mine = [made.mean(service, "clover") for service in made.services]
    saved, same = [one.saving_ratio for one in mine], [one.saving_same_gpus_ratio for one in mine]
    points, relative = [one.loss_points for one in mine], [100 * one.loss_ratio for one in mine]
    best = [made.mean(service, "oracle") for service in made.services]
    gaps = [1 - one.objective / top.objective for one, top in zip(mine, best, strict=True) if top.objective > 0]
    violations = sum(one.violations for one in made.means)
    return [
        _claim("9", "carbon saved by each service", "> 75 %", f"{_all(saved)}", min(saved) > 0.75),
        _claim("9", "carbon saved, mean", "80 %", _one(saved), float(np.mean(saved)) >= 0.80),
        Claim("Fig. 9", "the same with all GPUs still powered", "not said", _all(same), ""),
        _claim("9", "accuracy lost, mean", "3 %", f"{np.mean(points):.1f} points; {np.mean(relative):.1f} % relative",
               float(np.mean(points)) <= 3.3),
        _claim("9", "configurations above the SLO once chosen", "none", str(violations), violations == 0),
        _claim("10", "distance to ORACLE's objective", "within 5 %", _all(gaps), bool(gaps) and max(gaps) <= 0.05,
               bool(gaps) and float(np.mean(gaps)) <= 0.06),
    ]  # fmt: skip


def _search(made: CloverFigures) -> list[Claim]:
    clover = [made.mean(service, "clover") for service in made.services]
    blover = [made.mean(service, "blover") for service in made.services]
    learning = [made.mean(service, "learning") for service in made.services]
    time = float(np.mean([one.optimise_time_ratio for one in clover]))
    ratio = _tried(clover) / max(_tried(blover), 1.0)
    within = sum(one.trials * one.meeting_ratio for one in clover) / max(_tried(clover), 1.0)
    ours = _tried(learning) / max(_tried(clover), 1.0)
    true = float(np.mean([one.optimise_time_true_ratio for one in clover]))
    return [
        _claim("12a", "time in optimisation, at 30 s a trial", "1.2 %", f"{100 * time:.1f} %", time <= 0.015),
        Claim("Fig. 12a", "the same as long as trials really take", "not said", f"{100 * true:.1f} %", ""),
        _claim("12b", "CLOVER's trials against BLOVER's", "< 50 %", f"{100 * ratio:.0f} %", ratio < 0.5),
        _claim("12b", "CLOVER's trials within the SLO", "60 %", f"{100 * within:.0f} %", within >= 0.6),
        Claim("Fig. 12b", "trials of our search against CLOVER's", "–", f"{100 * ours:.0f} %", ""),
    ]


def _robust(made: CloverFigures) -> list[Claim]:
    rising = all(bool(np.all(np.diff(made.weights[service], axis=0) >= -1e-9)) for service in made.services)
    regions = [one.saving_ratio for one in made.means if one.scheme == "clover"]
    found = [
        _claim("14a", "saving and loss rise with lambda", "yes", "yes" if rising else "no", rising),
        *(_threshold(made, loss, paper, bar) for loss, paper, bar in ((0.008, "75 %", 0.75), (0.002, "> 55 %", 0.55))),
    ]
    four = min(float(one.base_p95_ratio[1:].min()) for one in made.fewer)
    two = max(float(one.mixture_p95_ratio.max()) for one in made.fewer)
    return [
        *found,
        _claim("15", "BASE's p95 on fewer GPUs", "> 1", f"at least {four:.2f}", four > 1),
        _claim("15", "the mixtures' p95 on 2 GPUs", "< 1", f"at most {two:.2f}", two < 1),
        _claim("16", "saved in other regions and seasons", "> 60 %", f"at least {100 * min(regions):.0f} %",
               min(regions) > 0.6),
    ]  # fmt: skip


def _threshold(made: CloverFigures, loss: float, paper: str, bar: float) -> Claim:
    mine = [one for one in made.allowed if one.loss_ratio == loss]
    saved = [one.columns_saving_ratio for one in mine]
    best = max((value for value in saved if not math.isnan(value)), default=math.nan)
    return _claim(
        "14b", f"saved with {100 * loss:g} % of accuracy lost", paper, _all(saved), best >= bar, best >= 0.6 * bar
    )


def _tried(ones: list[Mean]) -> float:
    return sum(one.trials for one in ones)


def _claim(figure: str, what: str, paper: str, ours: str, holds: bool, partly: bool = False) -> Claim:
    return Claim(f"Fig. {figure}", what, paper, ours, "holds" if holds else "partly" if partly else "does not hold")


def _all(values: list[float]) -> str:
    return " / ".join("none" if math.isnan(value) else f"{100 * value:.1f}" for value in values) + " %"


def _one(values: list[float]) -> str:
    return f"{100 * float(np.mean(values)):.1f} %"
