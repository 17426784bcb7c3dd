"""``joulery plan``: the contract for scripts, the picture, bad input, the running plan."""

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import get_args

import pytest
from click.shell_completion import ShellComplete

from joulery.ui.cli import cli, main

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TWELVE, THREE = EXAMPLES / "igniter-12.yaml", EXAMPLES / "igniter-3.yaml"


def plan(capsys, *arguments):
    code = main(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def planned(capsys, *arguments):
    code, out, err = plan(capsys, *arguments, "--json")
    assert err == ""
    return code, json.loads(out)


def site(folder, *services, text=""):
    file = folder / "site.yaml"
    lines = [
        "joulery: 1",
        "fleet: {gpus: [{name: V100, price: 3.06 USD/h}]}",
        text or "plan: {arrivals: {kind: constant}}",
        "services:",
    ]
    for name, model, slo, rate in services:
        lines.append(f"  - {{name: {name}, model: {model}, rate: {rate}, slo: {{latency: {slo}, quantile: 99 %}}}}")
    file.write_text("\n".join(lines))
    return file


def test_the_contract_for_scripts(capsys):
    code, document = planned(capsys, TWELVE, "--preset", "igniter")
    assert code == 0
    assert document["cost_usd_per_hour"] == pytest.approx(18.36)
    assert document["violations"] == []
    assert (document["bound"]["gpus"], document["bound"]["cost_usd_per_hour"]) == (6, pytest.approx(18.36))
    assert document["optimal"] is True
    assert len(document["gpus"]) == 6
    second = document["gpus"][1]
    assert second["type"] == "V100"
    assert second["frequency_mhz"] == pytest.approx(1503.3, abs=0.05)
    assert second["power_w"] == 300
    assert (
        second["instances"][0].items()
        >= {
            "workload": "W8",
            "model": "vgg19",
            "share_ratio": 0.75,
            "batch": 6,
            "slo_s": 0.03,
        }.items()
    )
    assert second["instances"][0]["latency_s"] == pytest.approx(14.9511e-3, abs=1e-6)
    assert second["instances"][0]["throughput_rps"] == pytest.approx(411.2, abs=0.05)


def test_best_is_the_default_and_proves_itself(capsys):
    code, document = planned(capsys, TWELVE)
    assert code == 0
    assert len(document["gpus"]) == 5
    assert document["cost_usd_per_hour"] == pytest.approx(15.30)
    assert document["optimal"] is True
    assert document["violations"] == []
    assert document["binding"]["slack_ratio"] >= 0


def test_latency_parts_add_up(capsys):
    _, document = planned(capsys, THREE, "--preset", "igniter")
    for each in document["gpus"][0]["instances"]:
        assert sum(each["latency_parts_s"].values()) == pytest.approx(each["latency_s"])
        assert each["slack_s"] == pytest.approx(each["limit_s"] - each["latency_s"])
    names = [(each["workload"], each["share_ratio"], each["batch"]) for each in document["gpus"][0]["instances"]]
    assert names == [("V", 0.375, 6), ("R", 0.3, 8), ("A", 0.1, 4)]


def test_policies_side_by_side(capsys):
    _, document = planned(capsys, TWELVE, "--compare", "ffd,gpulets,gslice,igniter,best")
    lines = {line["policy"]: line for line in document["compare"]}
    assert (lines["ffd"]["gpus"], lines["ffd"]["violations"]) == (5, 9)
    assert (lines["igniter"]["gpus"], lines["best"]["gpus"]) == (6, 5)
    assert lines["igniter"]["share_ratio"] == pytest.approx(4.725)


@pytest.mark.slow
def test_a_plan_that_violates_slos_exits_with_3(capsys):
    code, document = planned(capsys, TWELVE, "--preset", "ffd")
    assert code == 3
    assert len(document["violations"]) == 9
    assert document["optimal"] is False
    code, out, _ = plan(capsys, TWELVE, "--preset", "ffd")
    assert code == 3
    assert "9 services predicted to violate the SLO" in out


def test_the_screen(capsys):
    code, out, _ = plan(capsys, TWELVE, "--preset", "igniter", "--explain")
    assert code == 0
    assert "6 × V100, $18.36/h; every service within its SLO" in out
    assert re.search(r"GPU 2 +W8 75 .*W6 15 .*1503 MHz +300 W +throttled", out)
    assert re.search(r"W10 +ssd +60 % +2 .*12\.3 ms +12\.5 ms", out)
    assert "binding: latency of" in out
    assert re.search(r"GPU 2 W6: 15 % .*batch of 4 .*20\.0 ms; beside W8; the power cap costs", out)


@pytest.mark.slow
def test_the_page_is_self_contained(capsys, tmp_path):
    plan(capsys, TWELVE, "--html", tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "$15.30/h; every service within its SLO" in text
    assert not re.search(r"(src|href)=", text)
    assert "<script" not in text
    picture = text[text.index("<svg") : text.index("</svg>") + 6]
    root = xml.etree.ElementTree.fromstring(picture)
    titles = [node.text for node in root.iter("title")]
    _, document = planned(capsys, TWELVE)
    assert len(titles) == sum(len(gpu["instances"]) for gpu in document["gpus"])


@pytest.mark.slow
def test_a_running_plan(capsys, tmp_path):
    running = tmp_path / "running.json"
    plan(capsys, TWELVE, "--preset", "igniter", "--out", running)
    _, same = planned(capsys, TWELVE, "--preset", "igniter", "--running", running)
    assert same["difference"]["migrations"] == 0
    assert same["difference"]["changes"] == []
    _, other = planned(capsys, TWELVE, "--running", running)
    assert other["difference"]["migrations"] > 0
    _, followed = planned(capsys, TWELVE, "--running", running, "--follow")
    assert followed["difference"]["migrations"] == 0
    assert len(followed["gpus"]) == 6
    _, out, _ = plan(capsys, TWELVE, "--running", running)
    assert re.search(r"against the running plan: \d+ migrated", out)


def test_following_migrates_few_where_services_come_and_go(capsys, tmp_path):
    running = tmp_path / "running.json"
    plan(capsys, TWELVE, "--preset", "igniter", "--out", running)
    changed = tmp_path / "site.yaml"
    text = TWELVE.read_text()
    text = re.sub(r"  - \{name: W9,.*\n", "", text)
    changed.write_text(text + "  - {name: new, model: resnet50, rate: 300 /s, slo: {latency: 30 ms, quantile: 99 %}}\n")
    code, document = planned(capsys, changed, "--running", running, "--follow")
    assert code == 0
    what = {(each["workload"], each["what"]) for each in document["difference"]["changes"]}
    assert ("W9", "stop") in what
    assert ("new", "start") in what
    assert document["difference"]["migrations"] == 0
    assert len(document["gpus"]) <= 6


@pytest.mark.parametrize("preset", ["igniter", "best"])
def test_the_five_inputs_that_broke_the_published_code(capsys, tmp_path, preset):
    for model, slo, rate in (
        ("ssd", "7 ms", "50 /s"),
        ("ssd", "12 ms", "50 /s"),
        ("vgg19", "60 ms", "900 /s"),
        ("vgg19", "40 ms", "550 /s"),
        ("vgg19", "60.5 ms", "200 /s"),
    ):
        code, out, err = plan(capsys, site(tmp_path, ("one", model, slo, rate)), "--preset", preset, "--json")
        if code == 3 and not out:
            error = json.loads(err)["error"]
            assert error["kind"] == "infeasible"
            assert "one" in error["message"]
            continue
        document = json.loads(out)
        assert code == (3 if document["violations"] else 0)
        for gpu in document["gpus"]:
            assert sum(each["share_ratio"] for each in gpu["instances"]) <= 1 + 1e-9
            assert all(each["share_ratio"] > 0 for each in gpu["instances"])
            assert gpu["instances"]
        late = [each for gpu in document["gpus"] for each in gpu["instances"] if each["slack_s"] < 0]
        assert bool(late) == bool(document["violations"])


@pytest.mark.parametrize(
    ("services", "text", "said"),
    [
        ([("one", "yolo", "50 ms", "10 /s")], "", "no coefficients for model 'yolo'"),
        ([("one", "ssd", "50 ms", "0 /s")], "", "must be above 0"),
        ([("one", "ssd", "50 ms", "10 /s"), ("one", "ssd", "50 ms", "10 /s")], "", "is listed twice"),
        ([("one", "ssd", "50 ms", "10 /s")], "plan: {replicas: 0}", "must be at least 1"),
        ([("one", "ssd", "50 ms", "10 /s")], "plan: {preset: magic}", "is not a known value"),
        ([("one", "ssd", "-3 ms", "10 /s")], "", "must be above 0"),
    ],
)
def test_bad_sites_are_one_clear_error(capsys, tmp_path, services, text, said):
    code, out, err = plan(capsys, site(tmp_path, *services, text=text))
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("services: [{name: a, model: ssd, rate: 5 /s, slo: {latency: 50 ms}}]", "fleet has no GPU type"),
        ("fleet: {gpus: [{name: V100, price: 3 USD/h}]}", "nothing to plan"),
        (
            "fleet: {gpus: [{name: H200, price: 3 USD/h}]}\n"
            "services: [{name: a, model: ssd, rate: 5 /s, slo: {latency: 50 ms}}]",
            "GPU type H200",
        ),
        (
            "fleet: {gpus: [{name: V100, price: 3 USD/h}]}\nservices: [{name: a, model: ssd, slo: {latency: 50 ms}}]",
            "states no rate",
        ),
        ("fleet: {gpus: [{name: V100, price: 3 EUR/h}]}", "EUR/h"),
        (
            "fleet: {gpus: [{name: V100, price: 3 USD/h}]}\nservices: [{name: a, rate: 5 /s, slo: {latency: 50 ms}}]",
            "family",
        ),
    ],
)
def test_a_site_that_says_too_little(capsys, tmp_path, lines, said):
    (tmp_path / "site.yaml").write_text(f"joulery: 1\n{lines}\n")
    code, _, err = plan(capsys, tmp_path / "site.yaml")
    assert code == 2
    assert said in err


def test_a_broken_running_plan_is_named(capsys, tmp_path):
    for content, said in (
        ("{", "not JSON"),
        ('{"gpus": [{"type": 3}]}', "not a plan"),
        ("[]", "not a plan"),
    ):
        (tmp_path / "plan.json").write_text(content)
        code, _, err = plan(capsys, THREE, "--running", tmp_path / "plan.json")
        assert code == 2
        assert said in err
    assert plan(capsys, THREE, "--follow")[0] == 2


def test_a_profile_file_of_ones_own(capsys, tmp_path):
    from joulery.perf.catalog import profile
    from joulery.perf.interference.document import as_document

    (tmp_path / "mine.json").write_text(json.dumps(as_document(profile("v100"))))
    (tmp_path / "site.yaml").write_text(
        THREE.read_text().replace("price: 3.06", "profile_file: mine.json, price: 3.06")
    )
    _, document = planned(capsys, tmp_path / "site.yaml", "--preset", "igniter")
    assert [each["workload"] for each in document["gpus"][0]["instances"]] == ["V", "R", "A"]


@pytest.mark.slow
def test_random_arrivals_take_more_gpus(capsys, tmp_path):
    (tmp_path / "site.yaml").write_text(TWELVE.read_text().replace("kind: constant", "kind: poisson"))
    code, document = planned(capsys, tmp_path / "site.yaml")
    assert code == 0
    # Eight without the published error of the coefficients as a margin.
    assert len(document["gpus"]) == 9
    assert {each["max_delay_s"] for gpu in document["gpus"] for each in gpu["instances"]} == {0.0}
    code, faithful = planned(capsys, tmp_path / "site.yaml", "--preset", "igniter")
    assert code == 3
    assert len({each["workload"] for each in faithful["violations"]}) == 12


def test_the_highest_of_changing_rates_is_provided_for(capsys, tmp_path):
    text = THREE.read_text().replace(
        "rate: 500 /s", "rates: [{from: 0 s, rate: 100 /s}, {from: 6 h, rate: 500 /s}, {from: 20 h, rate: 50 /s}]"
    )
    (tmp_path / "site.yaml").write_text(text)
    _, document = planned(capsys, tmp_path / "site.yaml", "--preset", "igniter")
    assert [each["rate_rps"] for each in document["gpus"][0]["instances"] if each["workload"] == "A"] == [500]


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (("--preset", "muservee"), ("--preset", "'muservee'", "'joint'", "Did you mean 'muserve'?")),
        (("--compare", "best,ffdd"), ("--compare", "'ffdd'", "gslice", "Did you mean 'ffd'?")),
        (("--compare", "muserve"), ("--compare", "muserve", "igniter")),
    ],
)
def test_a_wrong_preset_names_its_flag_and_what_there_is(capsys, flags, facts):
    code, out, err = plan(capsys, TWELVE, *flags)
    assert (code, out) == (2, "")
    assert [fact for fact in facts if fact not in err] == []


def test_the_presets_of_the_flags_are_those_there_are():
    from joulery.app.planning.joint import KNOBS
    from joulery.app.planning.plans import COMPARED, PRESETS
    from joulery.config.plan import PlanSection
    from joulery.ui.cli import plan as verb

    assert set(verb.PRESETS) == set(PRESETS)
    assert set(verb.COMPARED) == set(COMPARED) and KNOBS in COMPARED
    assert set(get_args(PlanSection.model_fields["preset"].annotation)) < set(PRESETS)


@pytest.mark.parametrize(
    ("words", "incomplete", "offered"),
    [
        (["--preset"], "", {"best", "muserve", "columns", "clover", "joint", "language", "ffd++"}),
        (["--preset"], "j", {"joint"}),
        (["--compare"], "best,ff", {"best,ffd", "best,ffd++"}),
    ],
)
def test_a_shell_completes_presets(words, incomplete, offered):
    completion = ShellComplete(cli, {}, "joulery", "_JOULERY_COMPLETE")
    found = {one.value for one in completion.get_completions(["plan", *words], incomplete)}
    assert offered <= found
    assert all(word.startswith(incomplete) for word in found)
