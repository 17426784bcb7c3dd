"""Word vectors by skip-gram with negative samples."""

import torch
from torch import nn


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Embedding(200, 16, sparse=True), nn.Embedding(200, 16, sparse=True)

    def forward(self, center, context, negative):
        v = self.inside(center)
        good = (v * self.outside(context)).sum(-1)
        bad = torch.bmm(self.outside(negative), v.unsqueeze(2)).squeeze(2)
        return -(nn.functional.logsigmoid(good) + nn.functional.logsigmoid(-bad).sum(1)).mean()


model = SkipGram()
optimizer = torch.optim.SparseAdam(list(model.parameters()))
for _ in range(8):
    optimizer.zero_grad()
    model(*(torch.randint(0, 200, size) for size in ((16,), (16,), (16, 5)))).backward()
    optimizer.step()
