"""A check of the untrained model, then gradients of twelve batches for each step, with a transform that is a module."""

import torch
from torch import nn


class Flip(nn.Module):
    def forward(self, x):
        return x.flip(-1)


torch.manual_seed(0)
flip = Flip()
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
x, y = torch.randn(48, 16, 32), torch.randint(0, 10, (48, 16))

model.eval()
with torch.no_grad():
    for batch in range(7):
        model(flip(x[batch]))

model.train()
for _ in range(2):
    for batch in range(48):
        loss = nn.functional.cross_entropy(model(flip(x[batch])), y[batch]) / 12
        loss.backward()
        if batch % 12 == 11:
            optimizer.step()
            optimizer.zero_grad()
