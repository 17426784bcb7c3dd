"""The scheduler's screen as one page without a script: waiting jobs with reasons, running jobs, and the grid."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from joulery.domain.format import UNKNOWN, grams, percent, si
from joulery.ui.kit.html import Child, Html, content_hash, head, static_text, table, tag, tiles, whole_page

_REFRESH_S = 15


def scheduler_page(view: Mapping[str, Any], *, live: bool = False) -> str:
    """The scheduler's screen as an HTML page.

    Args:
        view: The result of :func:`joulery.app.scheduler_view.scheduler_view`.
        live: Whether the browser reloads the page every few seconds.
    """
    style = static_text("joulery.css")
    policy = f"default-src 'none'; style-src {content_hash(style)}; base-uri 'none'; form-action 'none'; img-src data:"
    title = f"{view['site']}: jobs"
    top = head(title, style, policy=policy)
    if live:
        refresh = tag("meta", http_equiv="refresh", content=str(_REFRESH_S))
        top = Html(top.replace("</head>", f"{refresh}</head>"))
    jobs = view["jobs"]
    body = (
        _top(view),
        tag(
            "main",
            [tag("p", text, class_="banner bad") for text in view["problems"]],
            tiles(_facts(view), four=True),
            tag("h2", "Waiting"),
            _card(_waiting([job for job in jobs if job["state"] == "waiting"], view["now_s"])),
            tag("h2", "Running"),
            _card(_running([job for job in jobs if job["slots"]])),
            tag("footer", _footer(view)),
        ),
    )
    return whole_page(top, tag("body", *body))


def _top(view: Mapping[str, Any]) -> Html:
    pills = [tag("span", text, class_="pill") for text in (view["policy"], f"mode {view['mode']}") if text]
    name = tag("h1", tag("span", "joulery ", class_="brand"), view["site"])
    return tag("header", tag("div", name, tag("span", class_="spacer"), *pills), class_="top")


def _card(content: Html) -> Html:
    return tag("div", tag("div", content, class_="scroll"), class_="card")


def _footer(view: Mapping[str, Any]) -> str:
    about = f"As of {_local(view['now_s'])}. Energy and carbon: {_quality(view['jobs'])}."
    if not view["rounds"]:
        return f"{about} No round yet."
    several = len(view["clusters"]) > 1
    return " ".join(
        [about]
        + [
            f"Last round{f' of {name}' if several else ''} {_local(made['t_s'])}: {made['text']}."
            for name, made in view["rounds"].items()
        ]
    )


def _facts(view: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    jobs, g_per_kwh = view["jobs"], view["g_per_kwh"]
    running = [job for job in jobs if job["slots"]]
    powers = [job["power_w"] for job in running if job["power_w"] is not None]
    power_w = math.fsum(powers)
    unknown = len(running) - len(powers)
    note = f"{len(powers)} of {len(running)} running jobs" if unknown else "of the running jobs"
    rate = si(power_w * g_per_kwh / 1e3, "g/h") if powers and g_per_kwh is not None else UNKNOWN
    known = [job for job in jobs if job["carbon_g"] is not None]
    return [
        ("Waiting", f"{sum(job['state'] == 'waiting' for job in jobs)}", f"{len(running)} run"),
        ("Power now", si(power_w, "W") if powers else UNKNOWN, note),
        ("Grid intensity", UNKNOWN if g_per_kwh is None else f"{g_per_kwh:.0f} g/kWh", view["hour"] or "unknown hour"),
        ("Emission rate", rate, f"{grams(math.fsum(job['carbon_g'] for job in known))} so far" if known else ""),
    ]


def _waiting(jobs: Sequence[Mapping[str, Any]], now_s: float) -> Html:
    if not jobs:
        return tag("p", "No job waits.", class_="soft")
    ordered = sorted(jobs, key=lambda job: (job["rank"] is None, job["rank"] or 0, job["submit_s"]))
    rows: list[Sequence[Child]] = [
        (
            f"{job['rank'] or UNKNOWN}", *_job_cells(job), f"{job['min_slots']}", _ago(now_s - job["submit_s"]),
            UNKNOWN if job["expected_start_s"] is None else f"about {_local(job['expected_start_s'])}",
            job["waits_because"] or UNKNOWN,
        )
        for job in ordered
    ]  # fmt: skip
    names = ("rank", *_names(jobs), "slots", "waited", "expected start", "why it waits")
    width = len(_names(jobs))
    return table(names, rows, text={*range(2, width + 1), width + 3, width + 4})


def _running(jobs: Sequence[Mapping[str, Any]]) -> Html:
    if not jobs:
        return tag("p", "No job runs.", class_="soft")
    rows: list[Sequence[Child]] = [
        (
            *_job_cells(job), f"{job['slots']}",
            UNKNOWN if job["progress_ratio"] is None else percent(job["progress_ratio"]),
            UNKNOWN if job["power_w"] is None else si(job["power_w"], "W"),
            UNKNOWN if job["energy_j"] is None else si(job["energy_j"], "J"),
            grams(job["carbon_g"]), job["quality"] or UNKNOWN,
        )
        for job in sorted(jobs, key=lambda job: (-job["slots"], job["job"]))
    ]  # fmt: skip
    width = len(_names(jobs))
    names = (*_names(jobs), "slots", "done", "power", "energy", "carbon", "quality")
    return table(names, rows, text={*range(1, width), width + 5})


def _names(jobs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return ("job", *(("cluster",) if any("cluster" in job for job in jobs) else ()), "name", "owner")


def _job_cells(job: Mapping[str, Any]) -> tuple[str, ...]:
    cluster = (str(job["cluster"]),) if "cluster" in job else ()
    return (str(job["job"]), *cluster, str(job["name"]), str(job["owner"]))


def _quality(jobs: Sequence[Mapping[str, Any]]) -> str:
    found = sorted({job["quality"] for job in jobs if job["quality"]})
    return ", ".join(found) or "nothing counted yet"


def _local(t_s: float) -> str:
    return time.strftime("%a %d %b %H:%M", time.localtime(t_s))


def _ago(seconds: float) -> str:
    hours, minutes = divmod(max(0, int(seconds)) // 60, 60)
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {minutes:02} min"
