"""Gradients of four micro-batches are accumulated before each step of the optimizer."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters())
for number in range(24):
    loss = nn.functional.cross_entropy(model(torch.randn(4, 16)), torch.randint(0, 2, (4,))) / 4
    loss.backward()
    if (number + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
