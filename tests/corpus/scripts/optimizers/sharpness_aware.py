"""Sharpness-aware minimisation: an optimizer around another, with two passes a step."""

import torch
from torch import nn


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["move"] = 0.05 * p.grad / (p.grad.norm() + 1e-12)
                p.add_(self.state[p]["move"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["move"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
for _ in range(6):
    x, y = torch.randn(8, 8), torch.randint(0, 2, (8,))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.first_step()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.second_step()
