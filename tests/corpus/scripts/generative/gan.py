"""A generative adversarial network: two optimizers take turns on every batch."""

import torch
from torch import nn

generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4)
ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
for _ in range(6):
    discriminator.zero_grad()
    criterion(discriminator(torch.randn(16, 4)), ones).backward()
    fake = generator(torch.randn(16, 8))
    criterion(discriminator(fake.detach()), zeros).backward()
    optimizer_d.step()
    generator.zero_grad()
    criterion(discriminator(fake), ones).backward()
    optimizer_g.step()
