"""A variational autoencoder: a loss of two terms, and samples from the decoder alone."""

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(2):
    model.train()
    for batch in torch.rand(40, 64).split(8):
        optimizer.zero_grad()
        recon, mu, logvar = model(batch)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        (F.binary_cross_entropy(recon, batch, reduction="sum") + kld).backward()
        optimizer.step()
    with torch.no_grad():
        model.decode(torch.randn(8, 4))
