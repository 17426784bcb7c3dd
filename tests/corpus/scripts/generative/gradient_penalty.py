"""A Wasserstein GAN with a gradient penalty: the critic learns five times a step of the generator."""

import torch
from torch import nn

generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
for _ in range(2):
    for _ in range(5):
        real, fake = torch.randn(8, 2), generator(torch.randn(8, 4)).detach()
        share = torch.rand(8, 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        optimizer_c.zero_grad()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        optimizer_c.step()
    optimizer_g.zero_grad()
    (-critic(generator(torch.randn(8, 4))).mean()).backward()
    optimizer_g.step()
