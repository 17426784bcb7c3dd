"""A variational autoencoder that is never called as a whole: its methods call its parts."""

import torch
from torch import nn
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def encode(self, x):
        return self.encoder(x).chunk(2, -1)

    def loss(self, x):
        mean, log_variance = self.encode(x)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()
        return F.mse_loss(self.decoder(z), x) + divergence


model = VAE()
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
for _ in range(8):
    optimizer.zero_grad(set_to_none=True)
    model.loss(torch.rand(16, 64)).backward()
    optimizer.step()
    scheduler.step()
