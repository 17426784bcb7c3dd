import csv
import dataclasses
import io
import json
import math
import re
from dataclasses import replace

import pytest

from joulery.app.runs.recorded import load_run
from joulery.domain.energy.footprint import Footprint
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import CarbonBasis
from joulery.store.run.directory import create_run
from joulery.store.run.footprints import footprint_to_dict
from joulery.store.run.timeline import log_tick, write_site
from joulery.ui.cli import main
from joulery.ui.cli.report import BY as CLI_BY
from joulery.ui.reports.html import render_html, value_text
from joulery.ui.reports.messages import basis_text, carbon_note, energy_note, latency_text, requests_text, saving_text
from joulery.ui.reports.table import BY, roll_up
from tests.ui.demo import SITE, demo_run, footprint, ticks


def run_of(folder, report, *, kind="measure", **manifest):
    with create_run(folder, kind=kind, **manifest) as writer:
        writer.write_report(report)
    return folder


def printed(capsys, *arguments, code=0):
    assert main(["report", *map(str, arguments)]) == code
    return capsys.readouterr()


TEXT = """\
up quickstart ID
1 min 30 s from 2026-09-21 14:13:20 UTC

  energy    5.02 kJ  assumed ± 14 %, 99.8 % of the time covered
  carbon     250 mg  CO2e, GB average lifecycle intensity, replayed 960×: half-hourly history of 14 March 2023
  saving     21.3 %  of the grams above idle (16.3 % to 25.8 %), against the same requests on lite2
  requests    3,600  none failed
  latency   45.1 ms  p95, within the SLO of 80.0 ms
  accuracy  76.54 %  published ImageNet top-1, weighted by answers
  variants           lite0 31.0 %, lite1 33.0 %, lite2 36.0 %

  component       energy   share   carbon  quality
  cpu:0 package  2.35 kJ  46.8 %   112 mg  modelled ± 30 %
  machine dram     261 J   5.2 %  12.5 mg  assumed
  idle           2.21 kJ  44.0 %   112 mg  modelled
  unattributed     201 J   4.0 %  12.5 mg  modelled
  total          5.02 kJ   100 %   250 mg
"""


def test_text_is_what_a_person_wants(tmp_path, capsys):
    folder = demo_run(tmp_path / "run")
    printed(capsys, folder, "--out", tmp_path / "r.txt")
    lines = (tmp_path / "r.txt").read_text().replace(load_run(folder).name, "ID").splitlines()
    assert "\n".join(line.rstrip() for line in lines) + "\n" == TEXT
    assert "5.02 kJ" in printed(capsys, folder).out


def test_json_is_one_object_with_the_contract_keys(tmp_path, capsys):
    folder = run_of(tmp_path / "run", footprint_to_dict(footprint()))
    answer = json.loads(printed(capsys, folder, "--json").out)
    for key in ("energy_j", "carbon_g", "idle_j", "unattributed_j", "duration_s", "coverage_ratio", "quality"):
        assert answer[key] is not None, key
    assert set(answer["parts"][0]) >= {"device", "component", "energy_j", "quality", "meter"}
    parts_j = math.fsum(part["energy_j"] for part in answer["parts"])
    assert parts_j + answer["idle_j"] + answer["unattributed_j"] == pytest.approx(answer["energy_j"], rel=1e-9)
    assert answer["runs"][0]["interrupted"] is False
    assert "rows" not in answer


def at_once(folder, name, host, idle="whole", shift_s=0.0):
    """A run of ten seconds on a machine."""
    one = replace(footprint(), start_s=1000.0 + shift_s, end_s=1010.0 + shift_s)
    made = run_of(folder / name, footprint_to_dict(one))
    manifest = json.loads((made / "manifest.json").read_text())
    (made / "manifest.json").write_text(json.dumps({**manifest, "id": name, "host": host, "terms": {"idle": idle}}))
    return made


def test_the_runs_of_a_job_on_several_nodes_are_one_sum(tmp_path, capsys):
    nodes = [at_once(tmp_path, f"run-{number}", f"node{number}") for number in (1, 2, 3)]
    answer = json.loads(printed(capsys, *nodes, "--json").out)
    assert answer["energy_j"] == pytest.approx(3 * footprint().energy_j)
    assert answer["idle_j"] == pytest.approx(3 * footprint().idle_j)
    assert answer["duration_s"] == pytest.approx(3 * footprint().duration_s)
    assert (answer["start_s"], answer["end_s"], answer["notes"]) == (1000.0, 1010.0, [])
    assert [one["id"] for one in answer["runs"]] == ["run-1", "run-2", "run-3"]


@pytest.mark.parametrize(
    ("second", "noted"),
    [
        ({"host": "node1"}, True),
        ({"host": "node1", "shift_s": 9.0}, True),
        ({"host": "node1", "shift_s": 10.0}, False),
        ({"host": "node1", "idle": "share"}, False),
        ({"host": "node2"}, False),
    ],
)
def test_idle_power_that_two_runs_contain_is_noted_once(tmp_path, capsys, second, noted):
    runs = [at_once(tmp_path, "first", "node1"), at_once(tmp_path, "second", **second)]
    answer = json.loads(printed(capsys, *reversed(runs), "--json").out)
    assert len(answer["notes"]) == noted
    assert all(name in note for note in answer["notes"] for name in ("first", "second", "node1", "--idle share"))
    for form in ("text", "html"):
        assert printed(capsys, *runs, "--format", form).out.replace("\n", " ").count("--idle share") == noted


def test_json_of_a_site_keeps_its_summary(tmp_path, capsys):
    answer = json.loads(printed(capsys, demo_run(tmp_path / "run"), "--format", "json").out)
    assert answer["saving_ratio"] == 0.213
    assert answer["variants"]["lite0"] == 0.31


@pytest.mark.parametrize("by", BY)
def test_every_table_adds_up(tmp_path, capsys, by):
    runs = [demo_run(tmp_path / "a", owner="vision"), demo_run(tmp_path / "b", owner="speech")]
    answer = json.loads(printed(capsys, *runs, "--by", by, "--json").out)
    assert answer["by"] == by
    assert math.fsum(row["energy_j"] for row in answer["rows"]) == pytest.approx(answer["energy_j"], rel=1e-9)
    rows = list(csv.DictReader(io.StringIO(printed(capsys, *runs, "--by", by, "--format", "csv").out)))
    assert [row[by] for row in rows] == [row[by] for row in answer["rows"]]
    assert [float(row["energy_j"]) for row in rows] == [row["energy_j"] for row in answer["rows"]]


def test_the_choices_of_the_command_line_are_those_of_the_table():
    assert CLI_BY == BY


def test_owners_are_distinguished(tmp_path, capsys):
    runs = [demo_run(tmp_path / "a", owner="vision"), demo_run(tmp_path / "b", owner="speech")]
    answer = json.loads(printed(capsys, *runs, "--by", "owner", "--json").out)
    assert [row["owner"] for row in answer["rows"]] == ["speech", "vision"]
    assert "2 runs together" in printed(capsys, *runs).out


def test_charges_of_one_run_are_distinguished(tmp_path, capsys):
    shared = [
        {"workload": name, "owner": owner, "footprint": footprint_to_dict(footprint())}
        for name, owner in [("photos", "vision"), ("voices", "speech")]
    ]
    both = footprint() + footprint()
    folder = run_of(tmp_path / "run", {**footprint_to_dict(both), "charges": shared}, kind="up")
    for by, names in [("owner", ["speech", "vision"]), ("workload", ["photos", "voices"])]:
        answer = json.loads(printed(capsys, folder, "--by", by, "--json").out)
        assert [row[by] for row in answer["rows"]] == names


def test_damaged_charges_are_one_error(tmp_path, capsys):
    folder = run_of(tmp_path / "run", {**footprint_to_dict(footprint()), "charges": [{"owner": 1}]})
    assert "charges: KeyError" in printed(capsys, folder, "--by", "owner", code=2).err


def test_hours_are_those_in_which_the_energy_flowed(tmp_path, capsys):
    with create_run(tmp_path / "run", kind="up") as writer:
        write_site(writer, SITE)
        for tick in ticks(4):
            shift = 3600.0 if tick.energy_j > 150 else 0.0
            log_tick(writer, replace(tick, t_s=tick.t_s + shift))
        writer.write_report(footprint_to_dict(footprint(4)))
    rows = printed(capsys, tmp_path / "run", "--by", "hour", "--format", "csv").out.splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["2026-09-21T14:00Z", "2026-09-21T15:00Z"]


def test_hours_of_a_run_without_a_course_are_refused(tmp_path, capsys):
    folder = run_of(tmp_path / "run", footprint_to_dict(footprint()))
    assert "has no time series" in printed(capsys, folder, "--by", "hour", code=2).err


def test_runs_whose_grams_mean_different_things_are_not_added(tmp_path, capsys):
    other = {**footprint_to_dict(footprint()), "carbon_signal": "marginal"}
    runs = [run_of(tmp_path / "a", footprint_to_dict(footprint())), run_of(tmp_path / "b", other)]
    message = printed(capsys, *runs, code=2).err
    assert "cannot add grams of signal average and marginal" in message
    assert "account both with one carbon source" in message


def test_one_run_named_twice_is_refused(tmp_path, capsys):
    folder = demo_run(tmp_path / "run")
    assert "is named twice" in printed(capsys, folder, folder, code=2).err


def test_json_contradicting_format_is_refused(tmp_path, capsys):
    assert "--json contradicts --format" in printed(capsys, tmp_path, "--json", "--format", "csv", code=2).err


def test_a_killed_run_is_reported_from_its_ticks(tmp_path, capsys):
    folder = demo_run(tmp_path / "run", state="killed")
    out = printed(capsys, folder).out
    assert "interrupted" in out
    answer = json.loads(printed(capsys, folder, "--json").out)
    last = ticks()[44]
    assert answer["energy_j"] == answer["unattributed_j"] == pytest.approx(last.energy_j)
    assert answer["carbon_g"] == pytest.approx(last.carbon_g)
    assert (answer["carbon_signal"], answer["quality"], answer["duration_s"]) == ("average", "modelled", 45.0)
    assert answer["runs"][0]["interrupted"] is True
    assert "interrupted" in printed(capsys, folder, "--html", "-").out


def test_a_torn_last_line_does_not_matter(tmp_path, capsys):
    folder = demo_run(tmp_path / "run", state="killed")
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"t_s": 17900')
    assert json.loads(printed(capsys, folder, "--json").out)["duration_s"] == 45.0


def test_a_killed_run_without_carbon_has_no_grams(tmp_path, capsys):
    writer = create_run(tmp_path / "run", kind="up")
    write_site(writer, replace(SITE, carbon=None))
    log_tick(writer, replace(ticks(1)[0], carbon_g=math.nan, g_per_kwh=math.nan))
    answer = json.loads(printed(capsys, tmp_path / "run", "--json").out)
    assert answer["carbon_g"] is None
    assert "no carbon source was given" in printed(capsys, tmp_path / "run").out
    writer.close()


def damage(name, text):
    def apply(folder):
        (folder / name).write_text(text)

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "holds no run"),
        (damage("manifest.json", "{"), "manifest.json:1: not JSON"),
        (damage("manifest.json", '{"schema": "joulery.run/99"}'), "schema is 'joulery.run/99', this joulery"),
        (damage("manifest.json", "[]"), "schema is None"),
        (damage("report.json", "{}"), "not a footprint: KeyError 'parts'"),
        (damage("report.json", "[]"), "a report is one JSON object"),
        (damage("report.json", '{"energy_j": '), "not JSON"),
        (damage("timeline.parquet", "PAR1"), "not a readable Parquet file"),
    ],
)
@pytest.mark.parametrize("form", ["text", "json", "csv", "html"])
def test_damaged_and_newer_runs_are_one_clear_error(tmp_path, capsys, change, message, form):
    folder = demo_run(tmp_path / "run")
    change(folder)
    captured = printed(capsys, folder, "--format", form, code=2)
    assert message in captured.err
    assert captured.out == ""


def test_a_run_killed_before_its_first_tick_is_one_clear_error(tmp_path, capsys):
    create_run(tmp_path / "run", kind="up").close()
    assert "interrupted before anything was summed up" in printed(capsys, tmp_path / "run", code=2).err
    assert "holds no run" in printed(capsys, tmp_path / "nowhere", code=2).err


def test_out_refused_by_the_disk_is_one_clear_error(tmp_path, capsys):
    folder = demo_run(tmp_path / "run")
    message = printed(capsys, folder, "--format", "csv", "--out", tmp_path / "no" / "such" / "f", code=2).err
    assert "cannot write" in message
    assert "No such file or directory" in message


def test_a_failed_run_says_so(tmp_path, capsys):
    with pytest.raises(RuntimeError), create_run(tmp_path / "run", kind="measure") as writer:
        writer.write_report(footprint_to_dict(footprint()))
        raise RuntimeError
    assert "ended with an error" in printed(capsys, tmp_path / "run").out
    assert "ended with an error" in printed(capsys, tmp_path / "run", "--html", "-").out


def test_the_page_needs_nothing_from_anywhere(tmp_path):
    page = render_html(roll_up([load_run(demo_run(tmp_path / "run"))], "component"))
    assert not re.search(r"""(src|href)\s*=\s*["']""", page)
    assert not re.search(r"@import|url\(", page)
    assert "Content-Security-Policy" in page
    assert "unsafe" not in page.partition("</head>")[0].partition("<style>")[0]
    assert not re.search(r"<[^>]+\sstyle=", page), "the policy refuses style attributes"


def test_names_from_outside_cannot_become_markup(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>"
    folder = demo_run(tmp_path / "run", owner=evil)
    view = load_run(folder)
    service = replace(view.site.services[0], name=evil, variants=((evil, 0.5),))
    view = replace(view, site=replace(view.site, name=evil, services=(service,)))
    page = render_html(roll_up([view], "owner"))
    assert "<img" not in page


def test_a_measure_run_without_ticks_has_a_page_without_plots(tmp_path):
    page = render_html(roll_up([load_run(run_of(tmp_path / "run", footprint_to_dict(footprint())))], "component"))
    assert "data-chart" not in page
    assert "<script" not in page
    assert "Where the energy went" in page


def test_a_run_of_no_energy_has_a_page(tmp_path, capsys):
    folder = run_of(tmp_path / "run", footprint_to_dict(Footprint(duration_s=1.0, covered_s=1.0)))
    assert "No energy was metered." in printed(capsys, folder, "--html", "-").out
    assert "0 J" in printed(capsys, folder).out


def test_energy_that_nothing_could_read_is_unknown(tmp_path, capsys):
    folder = run_of(tmp_path / "run", footprint_to_dict(Footprint(duration_s=5.0)))
    out = printed(capsys, folder).out
    assert re.search(r"energy\s+–", out)
    assert json.loads(printed(capsys, folder, "--json").out)["energy_j"] is None


def test_several_runs_have_one_page(tmp_path):
    views = [load_run(demo_run(tmp_path / name)) for name in "ab"]
    page = render_html(roll_up(views, "run"))
    assert "2 runs" in page
    assert all(view.name in page for view in views)


def test_decisions_beyond_the_page_are_in_the_log(tmp_path):
    view = load_run(demo_run(tmp_path / "run"))
    many = replace(view, decisions=view.decisions * 60)
    page = render_html(roll_up([many], "component"))
    assert f"The last 500 of {len(many.decisions)}" in page


def test_words():
    live = replace(SITE.carbon, basis=CarbonBasis.LIVE, speed=1.0)
    assert basis_text(live) == "live"
    assert basis_text(replace(SITE.carbon, speed=1.0)) == "replayed"
    partly = replace(footprint(), carbon_covered_j=footprint().energy_j / 2, facility_j=footprint().energy_j * 1.5)
    assert carbon_note(partly, None).endswith("intensity known for 50.0 % of the energy; PUE 1.50 included")
    assumed = replace(footprint(), carbon_quality=Quality.ASSUMED)
    assert carbon_note(assumed, None) == "CO2e, average lifecycle intensity (assumed)"
    measured = Footprint(idle_j=1.0, duration_s=1.0, covered_s=1.0)
    assert energy_note(measured) == "measured, 100.0 % of the time covered"
    assert saving_text({"saving_ratio": 0.1, "baseline": "B"}) == ("10.0 %", "of the grams above idle, against B")
    whole = {"saving_machine_ratio": 0.04, "saving_ratio": 0.1, "saving_of": "joules", "baseline": "B"}
    first, rest = saving_text({**whole, "baseline_basis": "modelled", "baseline_seen_live": False})
    assert first == "4.0 %" and rest.startswith("of the joules of the whole machine, idle included; 10.0 % above idle")
    assert rest.endswith("modelled, baseline never observed")
    assert saving_text({}) is requests_text({}) is latency_text({}) is None
    assert requests_text({"requests": 1000, "failed": 2}) == ("1,000", "2 failed")


def test_the_load_is_one_phrase_while_nothing_is_lost() -> None:
    ended = {"answered": 9, "failed": 0, "abandoned": 0, "late": 0}
    report = {"requests": 9, "planned": 9, "sent": 9, "unsent": 0, "client": ended}
    assert requests_text(report) == ("9", "none failed; load: all 9 planned were sent and answered in time")
    late = requests_text({**report, "client": {**ended, "late": 2}})
    assert late is not None and "9 planned = 9 sent + 0 unsent" in late[1] and "2 of the answered late" in late[1]
    lost = requests_text({**report, "sent": 8, "unsent": 1, "client": {**ended, "answered": 8}})
    assert lost is not None and "8 sent + 1 unsent" in lost[1]
    assert latency_text({"p95_s": 0.1, "slo_s": 0.08})[1] == "p95, beyond the SLO of 80.0 ms"
    assert latency_text({"p95_s": 0.1})[1] == "95 % of the answers were faster"


def test_decision_values_in_a_line():
    assert value_text({"a": 0.123456, "b": [1, "x"]}) == "a 0.1235, b 1, x"
    steps = [{"rate_rps": 91.8, "weights": {}}, {"rate_rps": 118.1, "weights": {"lite1": 1}}]
    assert value_text(steps) == "(rate_rps 91.8, weights none), (rate_rps 118.1, weights lite1 1)"


def test_views_are_frozen(tmp_path):
    view = load_run(demo_run(tmp_path / "run"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.report = {}


def test_an_slo_violation_is_red(tmp_path):
    view = load_run(demo_run(tmp_path / "run"))
    late = replace(view, report={**view.report, "p95_s": 0.2})
    pages = [render_html(roll_up([one], "component")) for one in (view, late)]
    assert ['class="value bad-text"' in page for page in pages] == [False, True]
