"""Engines that run against those of a plan, and the commands that start them."""

import shlex

import pytest

from joulery.domain.gpu.language_plan import PlannedEngine, ServedModel, vllm_command
from joulery.policies.placement.language.as_planned import check_engines, missing

ONE = PlannedEngine("chat", "Qwen/Qwen3-32B", "bfloat16", 1, 96, 3)
TWO = PlannedEngine("chat", "Qwen/Qwen3-32B", "bfloat16", 2, 48, 1)


def test_a_command_has_what_the_plan_chose():
    line = vllm_command("Qwen/Qwen3-32B", "bfloat16", 2, 48)
    assert line == "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 --max-num-seqs 48 --dtype bfloat16"
    assert vllm_command("a/b", "fp8", 1, 8).endswith(" --quantization fp8")
    assert "quantization" not in vllm_command("a/b-FP8", "fp8", 1, 8)
    assert vllm_command("a/b", "mxfp4", 1, 8).endswith("--max-num-seqs 8"), "those weights are the model's own"
    assert shlex.split(vllm_command("/models/my model", "int4", 1, 8))[2] == "/models/my model"


def test_engines_as_planned_have_no_differences():
    served = {
        "a": ServedModel(("chat", "Qwen/Qwen3-32B"), 1, 96, "bfloat16"),
        "b": ServedModel(("Qwen/Qwen3-32B",), 2, 48),
        "c": ServedModel(("Qwen/Qwen3-32B",)),
    }
    found = check_engines((ONE, TWO), served)
    assert [each.differences for each in found] == [(), (), ()]
    assert found[0].unread == () and found[0].planned == ONE and found[1].planned == TWO
    assert found[1].unread == ("precision",)
    assert set(found[2].unread) == {"--tensor-parallel-size", "--max-num-seqs", "precision"}
    assert missing((ONE, TWO), found) == ("the plan has 4 replicas of Qwen/Qwen3-32B, the site names 3",)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (ServedModel(("other/model",)), "runs other/model"),
        (ServedModel((ONE.model,), 4, 96), "spreads over 4 GPUs, planned 1"),
        (ServedModel((ONE.model,), 1, 256), "runs 256 requests at once, planned 96"),
        (ServedModel((ONE.model,), 1, 96, "fp8"), "weights in fp8, planned bfloat16"),
    ],
)
def test_each_difference_is_named(says, words):
    (found,) = check_engines((ONE, TWO), {"a": says})
    assert words in found.differences[0]
    assert found.planned is None or found.differences[-1].startswith("planned: vllm serve ")


def test_an_engine_that_does_not_answer_is_not_judged():
    (found,) = check_engines((ONE,), {"a": ServedModel()})
    assert found.differences == () and found.unread == ("its model",) and found.planned is None
    assert missing((ONE,), (found,)) == ("the plan has 3 replicas of Qwen/Qwen3-32B, the site names 0",)
