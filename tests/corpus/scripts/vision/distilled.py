"""Distillation: a large teacher in evaluation mode is called before the student in every step."""

import torch
import torch.nn.functional as F
from torch import nn

teacher = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
student = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for _ in range(8):
    x = torch.randn(8, 16)
    with torch.no_grad():
        wanted = F.softmax(teacher(x) / 2, dim=1)
    optimizer.zero_grad()
    F.kl_div(F.log_softmax(student(x) / 2, dim=1), wanted, reduction="batchmean").backward()
    optimizer.step()
