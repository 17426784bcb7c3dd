"""An optimizer a parameter, stepped in the backward pass, so that gradients need no memory of their own."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}


def hook(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(hook)
for _ in range(8):
    model(torch.randn(8, 8)).square().mean().backward()
