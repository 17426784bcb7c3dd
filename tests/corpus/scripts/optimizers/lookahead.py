"""An optimizer around another one, with a closure."""

import torch
from torch import nn


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base, every=3, pull=0.5):
        self.base, self.every, self.pull, self.steps = base, every, pull, 0
        super().__init__(base.param_groups, {})
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        loss = self.base.step(closure)
        self.steps += 1
        if self.steps % self.every == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                    p.copy_(slow.lerp_(p, self.pull))
        return loss


recurrent, head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 1)
optimizer = Lookahead(torch.optim.Adam([*recurrent.parameters(), *head.parameters()]))


def closure():
    optimizer.zero_grad()
    loss = head(recurrent(torch.rand(4, 6, 8))[0][:, -1]).square().mean()
    loss.backward()
    return loss


for _ in range(8):
    optimizer.step(closure)
