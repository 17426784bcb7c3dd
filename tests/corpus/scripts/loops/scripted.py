"""A model traced by TorchScript and trained on."""

import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
model = torch.jit.trace(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)), torch.randn(8, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long)).backward()
    optimizer.step()
