"""Cross-validation: each fold trains a model of its own and evaluates it."""

import torch
from torch import nn

x, y = torch.randn(32, 8), torch.randint(0, 2, (32,))
scores = []
for fold in range(4):
    held = torch.arange(32) % 4 == fold
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for batch, target in zip(x[~held].split(8), y[~held].split(8), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        scores.append(float((model(x[held]).argmax(1) == y[held]).float().mean()))
