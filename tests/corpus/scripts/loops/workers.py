"""A DataLoader over an IterableDataset, with transforms that are modules."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


class Stream(IterableDataset):
    def __init__(self):
        self.transform = nn.Sequential(Noise(), nn.BatchNorm1d(4, affine=False, track_running_stats=False))

    def __iter__(self):
        for _ in range(24):
            yield self.transform(torch.randn(2, 4)).flatten(), torch.tensor(0)


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters())
for data, target in DataLoader(Stream(), batch_size=4):
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(data), target).backward()
    optimizer.step()
