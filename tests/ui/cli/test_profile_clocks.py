"""``joulery profile MODEL --clocks``: what scripts rely on, the page, bad input."""

import json
import re
from pathlib import Path

import pytest

from joulery.store.scores import ScoreDatabase
from joulery.ui.cli import main

HLO = """HloModule step

ENTRY %main (x: f32[64,512], w: f32[512,512]) -> f32[64,512] {
  %x = f32[64,512]{1,0} parameter(0)
  %w = f32[512,512]{1,0} parameter(1)
  ROOT %dot = f32[64,512]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def profile(capsys, *arguments):
    code = main(["profile", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_published_model_as_json(capsys) -> None:
    code, out, err = profile(capsys, "GPT2-large", "--clocks", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["schema"] == "joulery.clocks/1"
    assert (document["model"], document["device"], document["quality"]) == ("GPT2-large", "V100", "modelled")
    assert document["score"] == pytest.approx(0.53, abs=0.01)
    assert set(document["phases"]) == {"prefill", "decode"}
    assert document["curve"]["latency_s"][-1] == pytest.approx(0.832)
    assert len(document["operators"]) == 1732
    assert document["operators"][0].keys() >= {"name", "flops", "traffic_bytes", "score", "time_s", "phase"}


def test_another_gpu_is_assumed_and_not_calibrated_to_the_published_latency(capsys) -> None:
    document = json.loads(profile(capsys, "BERT-base", "--clocks", "--gpu", "A100", "--json")[1])
    assert (document["device"], document["quality"], document["calibration_ratio"]) == ("A100", "assumed", 1.0)
    assert document["curve"]["latency_s"][-1] < 0.123


def test_a_file_with_a_decoding_step_calibrated_kept_and_drawn(capsys, tmp_path: Path) -> None:
    graph, scores, page = tmp_path / "net.hlo", tmp_path / "scores.db", tmp_path / "net.html"
    graph.write_text(HLO)
    code, out, _ = profile(
        capsys, graph, "--clocks", "--decode", graph, "--steps", 9, "--latency", "51 ms", "--scores", scores,
        "--html", page, "-o", tmp_path / "net.json",
    )  # fmt: skip
    assert code == 0
    assert "net on V100" in out
    assert "51.0 ms" in out
    with ScoreDatabase(scores, read_only=True) as database:
        kept = database.profile("net", "V100")
    assert [operator.cost.count for operator in kept.operators] == [1.0, 9.0]
    assert kept.parameter_bytes == 4 * 512 * 512
    assert kept.latency_s[-1] == pytest.approx(0.051)
    assert json.loads((tmp_path / "net.json").read_text()) == kept.as_dict()
    text = page.read_text()
    assert "Modelled on an emulated GPU" in text
    assert text.count("<svg") == 3
    assert not re.search(r"(src|href)=", text)  # nothing from elsewhere


def test_what_joulery_cannot_count_is_said(capsys, tmp_path: Path) -> None:
    file = tmp_path / "odd.hlo"
    file.write_text(HLO.replace(" dot(", " mystery("))
    assert "no rule for the arithmetic of mystery (1)" in profile(capsys, file, "--clocks")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("GPT9", "--clocks"), "no such file or model: GPT9"),
        (("--clocks",), "name the model to profile"),
        (("GPT2-large", "--clocks", "--gpu", "B200"), "no such emulated GPU"),
        (("GPT2-large", "--clocks", "--dim", "batch=none"), "--dim"),
        (("GPT2-large", "--clocks", "--latency", "51"), "--latency"),
        (("GPT2-large", "--gpu", "v100"), "--gpu belongs to --clocks"),
        (("GPT2-large", "--clocks", "-o", "/nowhere/at/all"), "cannot write"),
    ],
)
def test_bad_input_is_one_error(capsys, arguments, message) -> None:
    code, _, err = profile(capsys, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_an_empty_file(capsys, tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    code, _, err = profile(capsys, tmp_path / "empty.onnx", "--clocks")
    assert code == 2
    assert "the file is empty" in err


def test_measured_where_the_clock_can_be_set(capsys, tmp_path: Path, monkeypatch) -> None:
    from tests.fakes.cpufreq import cpufreq_tree, settings

    tree = cpufreq_tree(tmp_path / "cpu", listed=(1_500_000, 2_000_000, 3_200_000))
    monkeypatch.setenv("JOULERY_CPUFREQ", str(tree))
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path / "state"))
    before = settings(tree)
    (tmp_path / "net.hlo").write_text(HLO)
    arguments = (tmp_path / "net.hlo", "--clocks", "--device", "cpu", "--runs", 2, "--json")
    code, out, _ = profile(capsys, *arguments, "--run", "os:getpid")
    document = json.loads(out)
    assert code == 0
    assert (document["quality"], document["device"]) == ("measured", "cpu")
    assert document["curve"]["clock_mhz"] == [1500, 2000, 3200]
    assert "median of 2 passes" in document["source"]
    assert settings(tree) == before
    for extra, message in (
        ((), "cannot run net on cpu by itself"),
        (("--run", "os:nothing"), "cannot be imported"),
        (("--run", "os"), "not a function"),
        (("--run", "os:sep"), "not a function"),
        (("--run", "os:getpid", "--latency", "1 s"), "--latency and --decode are for emulated"),
    ):
        code, _, err = profile(capsys, *arguments, *extra)
        assert code == 2
        assert message in err


def test_a_machine_whose_clock_cannot_be_set_says_so(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("JOULERY_CPUFREQ", str(tmp_path))
    (tmp_path / "net.hlo").write_text(HLO)
    code, _, err = profile(capsys, tmp_path / "net.hlo", "--clocks", "--device", "cpu", "--run", "os:getpid")
    assert code == 2
    assert "no cpufreq driver" in err
    assert profile(capsys, tmp_path / "net.hlo", "--clocks", "--device", "tpu")[0] == 2
