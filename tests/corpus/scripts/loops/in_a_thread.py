"""The main thread tries the model, as programs with a window or a server do; another thread trains it."""

import threading

import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(model(torch.zeros(1, 16)).shape)


def fit():
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.rand(8, 16)).square().mean().backward()
        optimizer.step()


worker = threading.Thread(target=fit)
worker.start()
worker.join()
