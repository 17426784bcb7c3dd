"""A forecaster that feeds its own predictions back, with teacher forcing at random."""

import random

import torch
from torch import nn

cell, head = nn.LSTMCell(1, 16), nn.Linear(16, 1)
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-2)
for _ in range(6):
    series = torch.randn(8, 13).cumsum(1)
    state, given, loss = None, series[:, :1], 0.0
    for step in range(12):
        state = cell(given, state)
        predicted = head(state[0])
        loss = loss + nn.functional.mse_loss(predicted, series[:, step + 1 : step + 2])
        given = series[:, step + 1 : step + 2] if random.random() < 0.5 else predicted
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
