"""Hugging Face and Lightning programs recorded live: models of the paper, and the loops people train with."""

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.tracers.torch import TorchTracer
from joulery.domain.trace.tracing import Steps, TracedSession
from tests.adapters.tracers.torch_products import products

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'joulery[torch]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers is not installed: pip install transformers",
    ),
]

from joulery.adapters.tracers.inject.torch_recorder import TorchRecorder  # noqa: E402  # needs torch

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
IDS = torch.arange(32).reshape(4, 8)


def recorded(folder: Path, action: Callable[[], None], model: Any, name: str) -> TracedSession:
    recorder = TorchRecorder(folder, **asdict(Steps(0, 0, 1, 1)))
    recorder.install()
    try:
        recorder.name(model, name)
        action()
    finally:
        recorder.finish()
    (session,), notes = TorchTracer().recorded(str(folder), None)
    assert notes == []
    return session


def trained(model: Any) -> Callable[[], None]:
    """Two training steps, from the output of the last layer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=IDS).last_hidden_state.square().mean().backward()
            optimizer.step()

    return steps


def unnamed_ratio(session: TracedSession) -> float:
    """Share of the forward and backward operations that has no module; by count, for times are the machine's."""
    trace = session.trace
    found = [
        trace.ops[op].startswith("<no module>")
        for op, phase in zip(trace.op.tolist(), trace.phase.tolist(), strict=True)
        if trace.phases[phase] in ("forward", "backward")
    ]
    return sum(found) / len(found)


def bert(attention: str = "eager") -> Any:
    from transformers import BertConfig, BertModel

    return BertModel._from_config(BertConfig(**SIZES), attn_implementation=attention).train()


def test_hugging_face_bert_has_every_product_named(tmp_path: Path) -> None:
    model = bert()
    session = recorded(tmp_path, trained(model), model, "bert")
    found = products(session)
    assert found["addmm", "forward"] + found["bmm", "forward"] == 17
    assert found["mm", "backward"] + found["bmm", "backward"] == 32
    names = Counter(session.trace.ops[op] for op in session.trace.op.tolist())
    assert [names[f"bert/encoder/layer_0/attention/self/query/{leaf}"] for leaf in ("addmm", "mm", "mm_1")] == [1, 1, 1]
    assert unnamed_ratio(session) <= 0.03


def test_checkpointed_layers_of_bert_are_recomputed_under_their_names(tmp_path: Path) -> None:
    model = bert()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = products(recorded(tmp_path, trained(model), model, "bert"))
    assert found["addmm", "recompute"] == 12 and found["bmm", "recompute"] == 4
    assert sum(count for (_, phase), count in found.items() if phase in ("backward", "recompute")) == 48


def test_albert_calls_one_layer_under_one_name(tmp_path: Path) -> None:
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(**{**SIZES, "num_hidden_layers": 3}, embedding_size=16)
    model = AlbertModel._from_config(config, attn_implementation="eager").train()
    session = recorded(tmp_path, trained(model), model, "albert")
    names = Counter(session.trace.ops[op] for op in session.trace.op.tolist())
    shared = "albert/encoder/albert_layer_groups_0/albert_layers_0/ffn"
    assert [names[f"{shared}/{leaf}"] for leaf in ("addmm", "mm", "mm_1")] == [3, 3, 3]
    assert products(session)["bmm", "forward"] == 6


TRAINER = """
import sys, torch, transformers
transformers.utils.logging.disable_progress_bar()
config = transformers.BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=100)
data = [{"input_ids": torch.arange(8), "labels": torch.tensor(i % 2)} for i in range(24)]
arguments = transformers.TrainingArguments("out", per_device_train_batch_size=4, num_train_epochs=1, report_to="none",
                                           save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True)
transformers.Trainer(transformers.BertForSequenceClassification(config), arguments, train_dataset=data).train()
print("trained")
"""  # noqa: E501

LIGHTNING = """
import logging, torch, lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def training_step(self, batch, _):
        (x,) = batch
        return self.layers(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 8)), batch_size=4)
lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False).fit(Net(), data)
print("trained")
"""


@pytest.mark.parametrize(
    ("needs", "program", "linear"),
    [
        ("accelerate", TRAINER, "BertForSequenceClassification/bert/encoder/layer_0/attention/self/query"),
        ("lightning", LIGHTNING, "Net/layers_0"),
    ],
    ids=["trainer", "lightning"],
)
def test_the_loops_people_train_with(tmp_path: Path, needs: str, program: str, linear: str) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: pip install {needs}")
    folder = tmp_path / "trace"
    folder.mkdir()
    (tmp_path / "train.py").write_text(program)
    environment = TorchTracer().environment(str(folder), Steps(1, 1, 3, 1), {})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "train.py"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr
    (session,), _ = TorchTracer().recorded(str(folder), None)
    assert session.steps == 3
    names = Counter(session.trace.ops[op] for op in session.trace.op.tolist())
    found = [names[f"{linear}/{leaf}"] for leaf in ("addmm", "mm_1" if f"{linear}/mm_1" in names else "mm")]
    assert found == [3, 3], [name for name in names if name.endswith("mm")]
    assert products(session)
