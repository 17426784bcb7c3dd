"""``joulery plan --preset muserve``: the contract for scripts, the page, bad input."""

import json
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from joulery.ui.cli import main

SITE = """joulery: 1
name: two
fleet: {{gpus: [{{name: V100, price: 3.06 USD/h{gpu}}}]}}
plan: {{preset: muserve, pipelines: {{requests: 1000{rules}}}}}
services:
  - {{name: photos, model: ResNet-50, rate: 2 /s, slo: {{latency: 500 ms, quantile: 99 %}}}}
  - {{name: chat, model: {model}, rate: 0.2 /s, slo: {{latency: {slo}, quantile: 95 %}}}}
"""


def site(folder: Path, *, gpu=", available: 2", rules="", model="GPT2-large", slo="8 s") -> Path:
    file = folder / "site.yaml"
    file.write_text(SITE.format(gpu=gpu, rules=rules, model=model, slo=slo))
    return file


def plan(capsys, *arguments):
    code = main(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_contract_for_scripts(capsys, tmp_path: Path) -> None:
    code, out, err = plan(capsys, site(tmp_path), "--json", "--compare", "best")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert (document["schema"], document["policy"], document["quality"]) == ("joulery.plan/1", "muserve", "modelled")
    assert document["cost_usd_per_hour"] == pytest.approx(6.12)
    assert document["violations"] == []
    assert (document["bound"], document["optimal"]) == (None, False)
    assert document["binding"]["workload"] in ("photos", "chat")
    assert len(document["gpus"]) == 2
    gpu = document["gpus"][0]
    assert (
        gpu["clock_floor_mhz"] <= gpu["frequency_mhz"] <= gpu["clock_ceiling_mhz"] == gpu["frequency_max_mhz"] == 1380
    )
    instance = next(each for each in document["gpus"] for each in each["instances"])
    assert instance.keys() >= {"workload", "model", "replica", "replicas", "rate_rps", "latency_s", "slack_s", "slo_s"}
    assert {each["workload"]: each["required_ratio"] for each in document["services"]} == {"photos": 0.99, "chat": 0.95}
    (best,) = document["compare"]
    assert best["policy"] == "best"
    assert best["power_w"] <= document["power_w"] + 1e-6


def test_text_explanation_and_page(capsys, tmp_path: Path) -> None:
    page, kept = tmp_path / "plan.html", tmp_path / "plan.json"
    code, out, _ = plan(capsys, site(tmp_path), "--preset", "best", "--explain", "--html", page, "--out", kept)
    assert code == 0
    assert "best: 2 × V100" in out
    assert "every service within its SLO" in out
    assert "a governor may set" in out
    text = page.read_text()
    assert not re.search(r"(src|href)=", text)
    picture = xml.etree.ElementTree.fromstring(re.search(r"<svg.*?</svg>", text, re.S)[0])
    assert len(picture.findall(".//{*}text")) >= 4
    assert json.loads(kept.read_text())["policy"] == "best"


def test_scores_of_an_own_model_come_from_the_database(capsys, tmp_path: Path) -> None:
    hlo = tmp_path / "mine.hlo"
    hlo.write_text(
        "HloModule mine\n\nENTRY %main (x: f32[64,512], w: f32[512,512]) -> f32[64,512] {\n"
        "  %x = f32[64,512]{1,0} parameter(0)\n  %w = f32[512,512]{1,0} parameter(1)\n"
        "  ROOT %dot = f32[64,512]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
    )
    code, _, err = plan(capsys, site(tmp_path, model="mine"))
    assert code == 2
    assert "no clock scores of mine on V100" in err
    assert "joulery profile mine --clocks --gpu V100 --scores FILE" in err
    assert main(["profile", str(hlo), "--clocks", "--latency", "20 ms", "--scores", str(tmp_path / "s.db")]) == 0
    capsys.readouterr()
    code, out, _ = plan(capsys, site(tmp_path, model="mine", rules=", scores: s.db"), "--json")
    assert code == 0
    assert {each["model"] for each in json.loads(out)["services"]} == {"ResNet-50", "mine"}


def test_as_few_gpus_as_needed_when_the_site_does_not_say(capsys, tmp_path: Path) -> None:
    document = json.loads(plan(capsys, site(tmp_path, gpu=""), "--json")[1])
    assert len(document["gpus"]) == 2  # on one, photos would wait behind chat for longer than they may take


@pytest.mark.parametrize(
    ("changed", "code", "message"),
    [
        ({"slo": "300 ms"}, 3, "service chat cannot answer within 0.3 s"),
        ({"model": "Bloom-3b", "gpu": ", available: 1, memory: 8 GiB"}, 3, "the whole cluster of 1 GPUs has room"),
        (
            {"model": "Bloom-3b", "gpu": ", available: 2, memory: 10 GiB", "rules": ", devices_per_model: 1"},
            3,
            "fits nowhere",
        ),
        ({"gpu": ", available: 0"}, 2, "there is no GPU to plan with"),
        ({"model": "GPT9"}, 2, "no clock scores of GPT9"),
        ({"gpu": ", profile: b200"}, 2, "no such emulated GPU"),
        ({"rules": ", beam: 99"}, 2, "beam"),
        ({"rules": ", link: 12 GB"}, 2, "link"),
    ],
)
def test_bad_input_is_one_error(capsys, tmp_path: Path, changed, code, message) -> None:
    got, _, err = plan(capsys, site(tmp_path, **changed))
    assert got == code
    assert message in err
    assert "Traceback" not in err


def test_what_belongs_to_other_plans(capsys, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    code, _, err = plan(capsys, site(tmp_path), "--running", tmp_path / "old.json")
    assert code == 2
    assert "cannot be compared with a running one" in err
    code, _, err = plan(capsys, site(tmp_path), "--preset", "igniter")
    assert code == 2
    assert "--preset: no such preset for pipelines" in err
    code, _, err = plan(capsys, site(tmp_path), "--compare", "ffd")
    assert code == 2
    assert "--compare: no such preset for pipelines (got ffd, expected muserve" in err


@pytest.mark.parametrize(("gpu", "key"), [("name: B200", "name"), ("name: V100, profile: b200", "profile")])
def test_a_gpu_without_an_emulation_is_named_by_the_key_it_has(capsys, tmp_path: Path, gpu, key) -> None:
    file = site(tmp_path)
    file.write_text(file.read_text().replace("name: V100", gpu, 1))
    code, _, err = plan(capsys, file)
    assert code == 2
    assert f"fleet.gpus.0.{key}: " in err and "v100, a100, h100" in err and "profile" in err.splitlines()[-1]
