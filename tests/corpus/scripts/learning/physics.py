"""A physics-informed network: derivatives of the network by its input are part of the loss."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(8):
    t = torch.rand(16, 1, requires_grad=True)
    u = model(t)
    (first,) = torch.autograd.grad(u.sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t, create_graph=True)
    start = model(torch.zeros(1, 1)) - 1
    loss = (second + 4 * u).square().mean() + start.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
