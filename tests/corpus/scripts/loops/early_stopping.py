"""Epochs with validation, the best weights kept, a patience, and the best weights loaded at the end."""

import copy

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
x, y = torch.randn(40, 8), torch.randn(40, 1)
best, best_state, patience = float("inf"), None, 2
for _epoch in range(3):
    model.train()
    for batch, target in zip(x[:32].split(8), y[:32].split(8), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held = zip(x[32:].split(4), y[32:].split(4), strict=True)
        loss = sum(float(nn.functional.mse_loss(model(part), goal)) for part, goal in held)
    scheduler.step(loss)
    if loss < best:
        best, best_state = loss, copy.deepcopy(model.state_dict())
    else:
        patience -= 1
model.load_state_dict(best_state)
