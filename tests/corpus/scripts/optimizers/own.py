"""An optimizer of the program's own, with parameter groups for weights that decay and those that do not."""

import torch
from torch import nn


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    group["lr"] * torch.sign(average.lerp(p.grad, 0.1))
                )
                average.lerp_(p.grad, 1 - group["beta"])


model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2))
decay = [p for p in model.parameters() if p.dim() > 1]
plain = [p for p in model.parameters() if p.dim() <= 1]
optimizer = Lion([{"params": decay, "weight_decay": 0.1}, {"params": plain}])
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
for _ in range(8):
    model(torch.randn(8, 8)).square().mean().backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    warmup.step()
    optimizer.zero_grad(set_to_none=True)
