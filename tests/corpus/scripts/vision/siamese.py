"""Metric learning: one network is called three times a step, for anchor, positive and negative."""

import torch
from torch import nn

net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 8))
criterion = nn.TripletMarginLoss()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(6):
    anchor, positive, negative = (net(torch.randn(4, 1, 8, 8)) for _ in range(3))
    optimizer.zero_grad()
    criterion(anchor, positive, negative).backward()
    optimizer.step()
