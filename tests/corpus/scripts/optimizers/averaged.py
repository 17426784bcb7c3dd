"""Stochastic weight averaging, its schedule, and batch statistics renewed at the end."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
averaged = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = SWALR(optimizer, swa_lr=0.05)
batches = [torch.randn(8, 8) for _ in range(4)]
for _ in range(2):
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    averaged.update_parameters(model)
    scheduler.step()
update_bn(batches, averaged)
