"""A model compiled by torch.compile (the eager backend needs no compiler)."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(6):
    optimizer.zero_grad()
    nn.functional.cross_entropy(compiled(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long)).backward()
    optimizer.step()
