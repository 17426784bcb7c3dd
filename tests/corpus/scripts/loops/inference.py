"""Inference alone: a classifier over batches, as a batch job runs it."""

import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)).eval()
with torch.inference_mode():
    for batch in torch.randn(40, 3, 8, 8).split(4):
        model(batch).softmax(1)
