"""Meta-learning: the model is called with adapted parameters, and the outer step differentiates through the inner."""

import torch
from torch import nn
from torch.func import functional_call

model = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
meta = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(6):
    meta.zero_grad()
    for _task in range(2):
        x = torch.rand(8, 1)
        y, parameters = torch.sin(x + torch.rand(())), dict(model.named_parameters())
        inner = nn.functional.mse_loss(functional_call(model, parameters, (x,)), y)
        gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        adapted = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        nn.functional.mse_loss(functional_call(model, adapted, (x,)), y).backward()
    meta.step()
