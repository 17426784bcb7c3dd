"""Segmentation by a U-Net with skip connections and a loss of two terms."""

import torch
import torch.nn.functional as F
from torch import nn


def double(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = double(3, 8), double(8, 16), double(16, 8)
        self.transposed, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        skip = self.down(x)
        middle = self.middle(F.max_pool2d(skip, 2))
        return self.out(self.up(torch.cat([skip, self.transposed(middle)], dim=1)))


model = UNet()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
for _ in range(6):
    mask = torch.randint(0, 2, (2, 1, 16, 16)).float()
    logits = model(torch.randn(2, 3, 16, 16))
    dice = 1 - 2 * (logits.sigmoid() * mask).sum() / (logits.sigmoid().sum() + mask.sum())
    optimizer.zero_grad()
    (F.binary_cross_entropy_with_logits(logits, mask) + dice).backward()
    optimizer.step()
