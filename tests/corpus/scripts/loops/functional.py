"""Parameters in a dictionary, gradients by torch.func, updates by hand: there is no optimizer."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
parameters = {name: value.detach() for name, value in model.named_parameters()}


def loss(parameters, x):
    return (functional_call(model, parameters, (x,)) - x.sum(1, keepdim=True)).square().mean()


gradients = grad_and_value(loss)
for _ in range(10):
    change, _ = gradients(parameters, torch.rand(8, 16))
    parameters = {name: value - 1e-2 * change[name] for name, value in parameters.items()}
