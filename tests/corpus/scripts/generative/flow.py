"""A normalizing flow of coupling layers, sampled after training."""

import math

import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip, self.net = flip, nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)[:: -1 if self.flip else 1]
        scale, shift = self.net(a).chunk(2, dim=1)
        b = b * scale.tanh().exp() + shift
        return torch.cat((b, a) if self.flip else (a, b), dim=1), scale.tanh().sum(1)


flow = nn.ModuleList(Coupling(bool(i % 2)) for i in range(4))
optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
for _ in range(8):
    x, logs = torch.randn(16, 4), 0.0
    for layer in flow:
        x, log = layer(x)
        logs = logs + log
    loss = (0.5 * x.square().sum(1) + 2 * math.log(2 * math.pi) - logs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
