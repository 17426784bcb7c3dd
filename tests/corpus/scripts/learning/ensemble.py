"""An ensemble: each batch trains five models, each by an optimizer of its own."""

import torch
from torch import nn

models = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(5)]
optimizers = [torch.optim.Adam(model.parameters()) for model in models]
for _ in range(6):
    x, y = torch.randn(8, 8), torch.randn(8, 1)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
