"""Adversarial training: an optimizer of the perturbation, made for each batch, steps three times before the model's."""

import torch
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    x, y = torch.rand(8, 16), torch.randint(0, 4, (8,))
    noise = torch.zeros_like(x, requires_grad=True)
    attack = torch.optim.SGD([noise], lr=0.1, maximize=True)
    for _ in range(3):
        attack.zero_grad()
        F.cross_entropy(model(x + noise), y).backward()
        attack.step()
    optimizer.zero_grad()
    F.cross_entropy(model(x + noise.detach()), y).backward()
    optimizer.step()
