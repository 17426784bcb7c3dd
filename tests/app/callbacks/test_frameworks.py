"""The callbacks inside the real Trainer and the real Lightning: figures reach the loggers in use."""

import csv
import math

import pytest

import joulery

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS, EPOCHS = 4, 2
OPTIONS = {"meters": ["fake:50"], "carbon": "360 g/kWh"}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "labels": torch.tensor(1.0)}


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, labels=None):
        out = self.layer(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


def trained(tmp_path, attach):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")

    class Logger(transformers.TrainerCallback):
        """A logger in use, as those of W&B and MLflow are."""

        def __init__(self):
            self.logs = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs.append(dict(logs))

    logger = Logger()
    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=EPOCHS, per_device_train_batch_size=2, logging_steps=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    energy = joulery.HuggingFaceCallback(**OPTIONS)
    callbacks = [logger] if attach else [logger, energy]
    trainer = transformers.Trainer(Tiny(), arguments, train_dataset=Rows(), callbacks=callbacks)
    if attach:
        assert energy.attach(trainer) is energy
    trainer.train()
    return energy, logger.logs, trainer.state.log_history


def test_trainer_logs_joules_of_steps_and_epochs_to_the_loggers_in_use(tmp_path):
    energy, logs, history = trained(tmp_path, attach=True)
    steps = [log["joulery/step_energy_j"] for log in logs if "joulery/step_energy_j" in log]
    epochs = [log["joulery/epoch_energy_j"] for log in logs if "joulery/epoch_energy_j" in log]
    assert len(steps) >= STEPS * EPOCHS // 2 and len(epochs) == EPOCHS
    assert 0 < math.fsum(epochs) <= energy.footprint.energy_j
    assert 2 * math.fsum(steps[: STEPS * EPOCHS // 2]) <= energy.footprint.energy_j
    assert energy.footprint.carbon_g == pytest.approx(energy.footprint.energy_j * 1e-4)
    assert any("joulery/run_carbon_g" in entry for entry in history)


def test_behind_the_loggers_the_figures_are_in_the_history(tmp_path):
    _, logs, history = trained(tmp_path, attach=False)
    assert not any("joulery/step_energy_j" in log for log in logs)
    assert any("joulery/step_energy_j" in entry for entry in history)


def test_lightning_logs_joules_of_steps_and_epochs_to_its_loggers(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Tiny()

        def training_step(self, batch, index):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    energy, logger = joulery.LightningCallback(**OPTIONS), CSVLogger(tmp_path)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", callbacks=[energy], logger=logger, log_every_n_steps=2,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), batch_size=2))
    logger.save()
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:  # noqa: PTH123
        rows = list(csv.DictReader(file))
    steps = [float(row["joulery/step_energy_j"]) for row in rows if row["joulery/step_energy_j"]]
    epochs = [float(row["joulery/epoch_energy_j"]) for row in rows if row["joulery/epoch_energy_j"]]
    assert len(steps) == STEPS * EPOCHS // 2 and len(epochs) == EPOCHS
    assert 0 < math.fsum(epochs) <= energy.footprint.energy_j
    assert energy.footprint.carbon_g == pytest.approx(energy.footprint.energy_j * 1e-4)


def test_training_that_fails_is_measured_until_then(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    energy = joulery.LightningCallback(**OPTIONS)
    energy.on_train_start(None, None)
    energy.on_exception(None, None, RuntimeError())
    assert energy.footprint.energy_j > 0
    assert isinstance(energy, lightning.Callback)
