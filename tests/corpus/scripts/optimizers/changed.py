"""Two phases: the head is trained on a frozen body, then all of it by a new optimizer."""

import torch
from torch import nn

body, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 2)
model = nn.Sequential(body, head)
body.requires_grad_(False)
optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
for phase in range(2):
    if phase:
        body.requires_grad_(True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
