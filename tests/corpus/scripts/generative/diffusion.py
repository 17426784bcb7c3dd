"""A denoising diffusion model with an average of its weights, then sampling step by step."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(10, 32)
        self.down, self.up = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, t):
        return self.up(F.silu(self.down(x) + self.time(t)))


model = Denoiser()
average = copy.deepcopy(model).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.2, 10), 0)
for _ in range(8):
    x, t, noise = torch.randn(8, 16), torch.randint(0, 10, (8,)), torch.randn(8, 16)
    noisy = alphas[t, None].sqrt() * x + (1 - alphas[t, None]).sqrt() * noise
    loss = F.mse_loss(model(noisy, t), noise)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(new, 0.1)
sample = torch.randn(4, 16)
with torch.inference_mode():
    for step in reversed(range(10)):
        sample = sample - 0.1 * average(sample, torch.full((4,), step))
