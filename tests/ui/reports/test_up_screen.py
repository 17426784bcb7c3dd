import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from joulery.domain.decisions import Decision
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import DecisionRecord, ServiceLabel, ServiceTick, Tick
from joulery.ui.reports.up_screen import ConsoleScreen, Silent, live_line, summary_lines

SERVICE = ServiceLabel("photos", 0.15, 0.95, (("lite0", 0.751), ("lite1", 0.767), ("lite2", 0.776)))
TICK = Tick(
    1000.0,
    2.0,
    power_w=4.16,
    quality=Quality.MODELLED,
    g_per_kwh=213.4,
    grid_s=1_602_633_600.0 + 13 * 3600 + 20 * 60,
    carbon_g=0.00123,
    services=(ServiceTick("photos", 82, 0, 0.0384, 1.0, 0.77, (("lite1", 0.75), ("lite2", 0.25))),),
)
REPORT = {
    "requests": 3187,
    "failed": 0,
    "duration_s": 91.2,
    "p95_s": 0.041,
    "p50_s": 0.0214,
    "slo_s": 0.15,
    "slo_quantile": 0.95,
    "slo_met": True,
    "attainment_ratio": 0.9987,
    "accuracy_ratio": 0.76931,
    "accuracy_source": "ImageNet top-1, published by its authors, weighted by requests",
    "variants": {"lite0": 0.0, "lite1": 0.69, "lite2": 0.31},
    "energy_j": 412.0,
    "band_j": 206.0,
    "quality": "modelled",
    "requests_j": 92.0,
    "serving_j": 31.0,
    "load_generator_j": 12.0,
    "idle_j": 277.0,
    "unattributed_j": 0.0,
    "other_j": 45.0,
    "carbon_g": 0.0231,
    "carbon_quality": "assumed",
    "carbon_source": "assumed typical day of 2020, 24 h replayed in 90 s",
    "pue": 1.0,
    "saving_ratio": 0.221,
    "saving_low_ratio": 0.213,
    "saving_high_ratio": 0.229,
    "saving_of": "grams",
    "saving_machine_ratio": 0.062,
    "saving_machine_low_ratio": 0.058,
    "saving_machine_high_ratio": 0.066,
    "baseline": "the same requests on lite2+lite2",
    "baseline_basis": "measured",
    "audit": {"periods": 12, "share_ratio": 0.019, "blocks": 14, "withheld": {"the SLO was threatened": 2}},
    "baseline_keeps_slo": True,
    "baseline_p95_s": 0.052,
    "baseline_seen_live": True,
    "calibration": {"cpu_error_ratio": 0.031, "latency_error_ratio": -0.12, "correction_ratio": {}},
    "plans": 14,
    "layout_changes": 2,
    "html": "runs/x/report.html",
    "run": "runs/x",
}


def text(report: dict) -> dict[str, str]:
    return dict(summary_lines(report))


def written(**changes: object) -> dict[str, object]:
    entry = {
        "model": "writer", "requests": 12, "failed": 1, "p95_s": 1.25, "p50_s": 0.4, "completion_tokens": 340,
        "energy_per_request_j": 3.2, "energy_per_token_j": 0.11, "quality": "modelled",
    }  # fmt: skip
    return {**REPORT, "language_models": [entry | changes]}


def test_a_language_model_has_a_line():
    assert text(written())["writer"] == (
        "12, 1 failed; p95 1250 ms, p50 400 ms; 340 tokens written; 3.20 J a request, 110 mJ a token, modelled"
    )
    nothing = dict.fromkeys(("energy_per_request_j", "energy_per_token_j", "quality"))
    assert text(written(**nothing))["writer"].endswith("340 tokens written; joules not known")
    assert text(written(energy_per_token_j=None))["writer"].endswith("; 3.20 J a request, modelled")
    assert text(written(requests=0))["writer"] == "nothing was asked"
    assert text(written(failed=12, p95_s=None))["writer"] == "12, 12 failed; nothing answered"


def test_the_live_line():
    line = live_line(TICK, 23.4, [SERVICE], 90.0).plain
    assert line == (
        "   23/90 s 13:20 213 g/kWh 4.16 W modelled  ████████████ lite1 75 % lite2 25 %  p95 38 ms of 150 ms"
        "  41 /s  1.23 mg"
    )
    assert live_line(TICK, 23.4, [SERVICE], None).plain.startswith("   23 s 13:20 ")


def test_the_live_line_fits_eighty_columns():
    busy = replace(
        TICK,
        power_w=1234.0,
        carbon_g=12.34,
        services=(replace(TICK.services[0], mix=(("lite0", 0.33), ("lite1", 0.34), ("lite2", 0.33))),),
    )
    assert len(live_line(TICK, 823.4, [SERVICE], 900.0, wide=False).plain) <= 80
    assert len(live_line(busy, 23.4, [SERVICE], 90.0, wide=False).plain) <= 88, "three variants while they change"


def test_a_violated_slo_is_red_and_what_is_unknown_is_a_dash():
    slow = replace(TICK, services=(replace(TICK.services[0], latency_s=0.2),))
    red = [span for span in live_line(slow, 1.0, [SERVICE], 90.0).spans if "red" in str(span.style)]
    assert len(red) == 1 and not [s for s in live_line(TICK, 1.0, [SERVICE], 90.0).spans if "red" in str(s.style)]
    nothing = Tick(1000.0, 1.0, services=(ServiceTick("photos", 0),))
    assert "– of 150 ms" in live_line(nothing, 1.0, [SERVICE], 90.0).plain
    assert "nan" not in live_line(nothing, 1.0, [SERVICE], 90.0).plain
    assert "ms" not in live_line(Tick(1000.0, 1.0), 1.0, [SERVICE], 90.0).plain


def test_the_summary_says_each_thing_with_how_well_it_is_known():
    said = text(REPORT)
    assert list(said) == (
        ["requests", "latency", "accuracy", "variants", "energy", "carbon", "saving", "model", "plans", "html", "run"]
    )
    assert said["requests"] == "3,187 in 1 min 31 s, none failed"
    assert said["latency"] == "p95 41 ms, p50 21 ms; p95 within the SLO of 150 ms, which 99.9 % of the answers kept"
    assert said["accuracy"] == (
        "76.93 % ImageNet top-1, published by its authors, weighted by requests; not measured here"
    )
    assert said["energy"] == (
        "412 J modelled ± 50 % = requests 92.0 J, serving 31.0 J, load generator 12.0 J, idle 277 J, "
        "unattributed 0 J; other processes' 45.0 J left out"
    )
    assert said["carbon"] == "23.1 mg CO2e assumed, assumed typical day of 2020, 24 h replayed in 90 s"
    assert said["saving"] == (
        "6.2 % of the grams of the whole machine, idle included (5.8 % to 6.6 %); "
        "22.1 % (21.3 % to 22.9 %) above idle; "
        "against the same requests on lite2+lite2; baseline measured in 12 periods, 1.9 % of the requests; "
        "not measured in 2 of 14 blocks (2 x the SLO was threatened)"
    )
    assert said["model"] == "on what really ran, the replay was off by +3.1 % in CPU time and -12 % in p95"
    assert said["plans"] == "14, 2 changes of layout"


def test_the_summary_hides_no_bad_news():
    bad = {
        **REPORT,
        "failed": 12,
        "slo_met": False,
        "p95_s": 12.3,
        "baseline_keeps_slo": False,
        "baseline_seen_live": False,
        "baseline_basis": "modelled",
        "audit": None,
        "saving_machine_low_ratio": None,
        "layout_changes": 1,
        "pue": 1.3,
    }
    said = text(bad)
    assert said["requests"].endswith("12 failed")
    assert "p95 12.3 s" in said["latency"] and "BEYOND the SLO" in said["latency"]
    assert said["saving"].endswith("modelled, baseline never observed; that would have missed the SLO (p95 52 ms)")
    assert "(unbounded to 6.6 %)" in said["saving"]
    assert said["plans"] == "14, 1 change of layout" and said["carbon"].endswith("PUE 1.30 included")


def test_a_run_without_answers_or_without_meters():
    nothing = {key: value for key, value in REPORT.items() if not key.startswith("saving")} | {
        "requests": 0,
        "p95_s": None,
        "accuracy_ratio": None,
        "energy_j": None,
        "carbon_g": None,
        "carbon_reason": "no source of carbon intensity was named",
    }
    said = text(nothing)
    assert "latency" not in said and "saving" not in said
    assert said["energy"] == "–: nothing was metered"
    assert said["carbon"] == "–: no source of carbon intensity was named"


def decided(kind: str, reason: str, cause: str, outcome: str = "applied") -> DecisionRecord:
    return DecisionRecord(1000.0, Decision(kind, "photos", [], "variants", reason, cause), outcome)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, highlight=False, color_system=None), out


def test_lines_instead_of_a_moving_one_where_there_is_no_terminal():
    where, out = console(terminal=False)
    with ConsoleScreen(where) as screen:
        screen.fact("service", "x " * 80)
        screen.progress(0, 2, "lite0 on cpu:1")
        screen.progress(2, 2, "")
        screen.begin([SERVICE], 12.0)
        for second in range(12):
            screen.tick(TICK, float(second))
        screen.decision(decided("set_layout", "the grid moved", "intensity"))
        screen.decision(decided("set_layout", "it would move", "intensity", outcome="advised"))
        screen.decision(decided("keep_layout", "kept", "intensity"))
        screen.decision(decided("set_layout", "first", "start"))
        screen.warn("careful")
        lines = out.getvalue().splitlines()
    assert [line for line in lines if "/12 s " in line and "213 g/kWh" in line][1].split()[0] == "5/12"
    assert sum("213 g/kWh" in line for line in lines) == 3, "every five seconds"
    assert (
        "  → the grid moved" in lines
        and "  advised: it would move" in lines
        and "kept" not in out.getvalue().replace("answers kept", "")
    )
    assert "first" not in out.getvalue() and "  ! careful" in lines
    assert "  profiling 0/2 lite0 on cpu:1" in lines and sum("profiling" in line for line in lines) == 1
    folded = [line for line in lines if set(line) == {" ", "x"}]
    assert folded and all(line.startswith(" " * 12 + "x") and len(line) <= 100 for line in folded)


def test_a_terminal_gets_one_line_that_moves_and_is_gone_in_the_end():
    where, out = console(terminal=True)
    with ConsoleScreen(where) as screen:
        screen.progress(0, 2, "lite0 on cpu:1")
        screen.progress(2, 2, "")
        screen.begin([SERVICE], None)
        screen.tick(TICK, 1.0)
        screen.tick(TICK, 2.0)
        screen.summary(REPORT)
    said = out.getvalue()
    assert "213 g/kWh" in said and "\x1b[2K" in said, "erased"
    assert said.index("3,187") > said.rindex("213 g/kWh")


def test_a_tick_before_the_beginning_has_no_owner():
    where, out = console(terminal=False)
    ConsoleScreen(where).tick(TICK, 1.0)
    assert out.getvalue() == ""


@pytest.mark.parametrize("screen", [Silent()])
def test_silence(screen, capsys):
    screen.fact("a", "b")
    screen.progress(1, 2, "c")
    screen.begin([SERVICE], math.inf)
    screen.tick(TICK, 1.0)
    screen.decision(decided("set_layout", "r", "demand"))
    screen.warn("w")
    assert capsys.readouterr() == ("", "")


def test_standbys_and_plans_that_follow_are_said_too():
    out = io.StringIO()
    with ConsoleScreen(Console(file=out, width=120)) as screen:
        for kind, policy, reason in (
            ("activate_standby", "standby", "the standby takes over"),
            ("slo_violated", "standby", "nothing left"),
            ("run_plan", "follow", "1 start, 0 move"),
        ):
            screen.decision(DecisionRecord(1.0, Decision(kind, "W1/0", None, policy, reason, "latency"), "applied"))
        screen.decision(DecisionRecord(1.0, Decision("run_plan", "plan", None, "plan", "given", "start"), "applied"))
    assert out.getvalue().split("\n")[:3] == ["  → the standby takes over", "  → nothing left", "  → 1 start, 0 move"]
    assert "given" not in out.getvalue()


def test_the_model_is_not_judged_by_answers_that_were_steered():
    errors = {"cpu_error_ratio": None, "latency_error_ratio": None, "correction_ratio": {}, "steered_ratio": 0.31}
    lines = dict(summary_lines({**REPORT, "calibration": errors}))
    assert lines["model"].startswith("not judged: 31")


LIMITS = {
    "device": "cpu",
    "full_w": 120.0,
    "best_ratio": 0.833,
    "best_w": 99.96,
    "limits": [{"ratio": 0.833, "slowdown": 1.03, "slowdown_high": 1.05, "energy_ratio": 0.905, "comparisons": 3}],
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            "cpu: 100 W of 120 W, service time +3.0 % (at most +5.0 %, 95 %), 9.5 % fewer joules for the same work, "
            "measured in 3 comparisons",
        ),
        ({"best_ratio": 1.0}, "cpu: full power; 1 compared, none within the bound is known to cost less"),
        ({"best_ratio": 1.0, "limits": []}, "cpu: full power; no limit was compared"),
    ],
)
def test_the_limit_of_a_device_is_in_the_summary(changes, said):
    assert dict(summary_lines({**REPORT, "power_limits": [{**LIMITS, **changes}]}))["limit"] == said


def test_joules_of_upstreams_stand_beside_those_of_the_machine_and_say_how_they_are_known():
    services = [{**REPORT, "service": "net", "upstream_j": 12.0, "upstream_quality": "assumed"}]
    lines = dict(summary_lines({**REPORT, "services": services}))
    assert lines["energy"].endswith("; beside it 12.0 J of upstreams (assumed)")
    assert "; 12.0 J of upstreams (assumed) included" in lines["saving"]
    assert "upstreams" not in " ".join(dict(summary_lines(REPORT)).values())


FAMILY = {"family": "chat", "answered": 1200, "variants": {"large": 0.25, "small": 0.75}, "accuracy_ratio": 0.725}
FIRST = {"ttft_slo_s": 0.5, "ttft_quantile": 0.95, "ttft_attainment_ratio": 0.97, "ttft_slo_met": True, "refused": 12}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "1,200 answered: large 25 %, small 75 %; accuracy 72.5 % declared"),
        (FIRST, "; first token: p95 within 500 ms, which 97.0 % kept; 12 refused for it"),
        ({**FIRST, "ttft_slo_met": False}, "; first token: p95 BEYOND 500 ms, which 97.0 % kept; 12 refused for it"),
        ({**FIRST, "ttft_attainment_ratio": None}, "1,200 answered: large 25 %, small 75 %; accuracy 72.5 % declared"),
    ],
)
def test_a_family_of_language_models_has_a_line(more, said):
    assert dict(summary_lines({**REPORT, "language_families": [{**FAMILY, **more}]}))["chat"].endswith(said)
