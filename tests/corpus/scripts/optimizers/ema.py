"""An exponential moving average of the weights, evaluated instead of the model."""

import copy

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
ema = copy.deepcopy(model).eval()
for parameter in ema.parameters():
    parameter.requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for number in range(8):
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            average.lerp_(parameter, 0.01)
        if number % 4 == 3:
            ema(torch.randn(8, 8))
