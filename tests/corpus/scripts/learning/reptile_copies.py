"""Reptile with a copy of the model for each task, and an optimizer of the initial weights."""

import copy

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
outer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _task in range(4):
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.02)
    phase = torch.rand(())
    for _ in range(5):
        x = torch.rand(16, 1)
        inner.zero_grad()
        nn.functional.mse_loss(fast(x), torch.sin(x + phase)).backward()
        inner.step()
    outer.zero_grad()
    for parameter, moved in zip(model.parameters(), fast.parameters(), strict=True):
        parameter.grad = (parameter - moved).detach()
    outer.step()
