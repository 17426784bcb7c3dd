"""Validation in evaluation mode that forgets to switch gradients off: before the training and after each epoch."""

import torch
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss():
    return F.cross_entropy(model(torch.rand(8, 16)), torch.randint(0, 4, (8,)))


def validate():
    model.eval()
    print(sum(loss().item() for _ in range(3)))
    model.train()


validate()
for _ in range(2):
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    validate()
