"""L-BFGS: the optimizer calls the model as often as it likes within a step."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
x = torch.linspace(0, 1, 32).unsqueeze(1)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), torch.sin(6 * x))
    loss.backward()
    return loss


for _ in range(6):
    optimizer.step(closure)
