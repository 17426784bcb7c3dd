"""Adversarial training: inputs are attacked by gradients of the model before each step of training."""

import torch
import torch.nn.functional as F
from torch import nn

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    x, y = torch.rand(8, 1, 8, 8), torch.randint(0, 4, (8,))
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x + delta), y), delta)
        delta = (delta + 0.01 * gradient.sign()).clamp(-0.03, 0.03).detach().requires_grad_()
    optimizer.zero_grad()
    F.cross_entropy(model(x + delta.detach()), y).backward()
    optimizer.step()
