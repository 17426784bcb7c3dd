"""The length predictor on real answers: 129 prompts left out by a draw, 515 learned from, 40 models."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from joulery.adapters.models import minilm
from joulery.app.wiring.length_predictor import prompt_encoder
from joulery.runtime.llm.predictor_training import evaluate, read_answers, train
from tests.data_folder import data_folder

HELD = 129


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    data, folder = data_folder("muserve"), tmp_path_factory.mktemp("lengths")
    table = pq.read_table(data / "alpaca_eval_lengths.parquet")
    ids = table["instruction_id"].to_numpy()
    held = np.isin(ids, np.random.default_rng(7).permutation(np.unique(ids))[:HELD])
    for name, chosen in (("train", ~held), ("held", held)):
        pq.write_table(table.filter(chosen), folder / f"{name}.parquet")
    texts = [data / "instructions.parquet"]
    return [read_answers([folder / f"{name}.parquet"], texts) for name in ("train", "held")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "accuracy", "macro_f1", "tau", "pairwise"),
    [("none", 0.38, 0.29, 0.36, 0.67), ("minilm", 0.45, 0.36, 0.44, 0.72)],
)
def test_it_is_as_good_on_prompts_it_has_not_seen_as_the_specification_asks(
    logs, choice, accuracy, macro_f1, tau, pairwise
):
    if choice == "minilm" and not minilm.installed():
        pytest.skip(f"the prompt encoder is not installed: {minilm.HOW}")
    learned, held = logs
    found = evaluate(train(learned, prompt_encoder(choice)), held, learned.prompts)
    assert (found.models, found.prompts, found.seen_prompts) == (40, HELD, 0)
    assert found.quality.accuracy >= accuracy
    assert found.quality.macro_f1 >= macro_f1
    assert found.quality.kendall_tau >= tau
    assert found.quality.pairwise >= pairwise


def test_auto_takes_what_is_installed(monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "no-such-package")
    assert prompt_encoder("auto") is None
