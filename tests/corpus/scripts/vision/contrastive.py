"""Contrastive learning: two views of a batch, one pass, similarities of all pairs."""

import torch
import torch.nn.functional as F
from torch import nn

encoder = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
projector = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], lr=3e-4)
for _ in range(6):
    views = torch.cat([torch.randn(4, 3, 12, 12), torch.randn(4, 3, 12, 12)])
    z = F.normalize(projector(encoder(views)), dim=1)
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(8, dtype=torch.bool), -1e9)
    loss = F.cross_entropy(similarity, torch.arange(8).roll(4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
