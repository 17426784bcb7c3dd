"""The whole step compiled: forward pass, loss and backward pass in one function."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.compile(backend="aot_eager")
def loss_of(x, y):
    return nn.functional.cross_entropy(model(x), y)


for _ in range(6):
    optimizer.zero_grad()
    loss_of(torch.randn(8, 16), torch.zeros(8, dtype=torch.long)).backward()
    optimizer.step()
