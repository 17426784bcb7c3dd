"""A LightningModule that optimises by hand, with two optimizers."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = nn.Linear(4, 8), nn.Linear(8, 1)
        self.automatic_optimization = False

    def training_step(self, batch, _):
        first, second = self.optimizers()
        (real,) = batch
        fake = self.generator(torch.randn(len(real), 4))
        first.zero_grad()
        self.manual_backward(self.discriminator(fake.detach()).mean() - self.discriminator(real).mean())
        first.step()
        second.zero_grad()
        self.manual_backward(-self.discriminator(fake).mean())
        second.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.discriminator.parameters()), torch.optim.Adam(self.generator.parameters())]


trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(Gan(), DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=8))
