"""Training resumed from a checkpoint in a new model with a new optimizer."""

import io

import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters())


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


model, optimizer = build()
train(model, optimizer, 5)
file = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
file.seek(0)
state = torch.load(file, weights_only=True)
del model, optimizer
model, optimizer = build()
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
train(model, optimizer, 5)
