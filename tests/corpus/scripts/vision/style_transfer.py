"""Style transfer: the picture is optimised, the network is frozen and only read."""

import torch
from torch import nn

features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).eval()
features.requires_grad_(False)


def gram(x):
    flat = x.flatten(2)
    return flat @ flat.transpose(1, 2) / flat.shape[2]


with torch.no_grad():
    style, content = gram(features(torch.rand(1, 3, 16, 16))), features(torch.rand(1, 3, 16, 16))
picture = torch.rand(1, 3, 16, 16, requires_grad=True)
optimizer = torch.optim.Adam([picture], lr=0.05)
for _ in range(8):
    optimizer.zero_grad()
    found = features(picture)
    (nn.functional.mse_loss(found, content) + nn.functional.mse_loss(gram(found), style)).backward()
    optimizer.step()
