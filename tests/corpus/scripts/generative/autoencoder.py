"""An adversarial autoencoder: encoder, decoder and discriminator are modules of their own, with an optimizer each."""

import torch
from torch import nn

encoder, decoder = nn.Linear(16, 4), nn.Linear(4, 16)
discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizers = [torch.optim.Adam(part.parameters()) for part in (encoder, decoder, discriminator)]
optimizer_e, optimizer_d, optimizer_c = optimizers
for _ in range(6):
    x = torch.randn(8, 16)
    for optimizer in optimizers:
        optimizer.zero_grad()
    nn.functional.mse_loss(decoder(encoder(x)), x).backward()
    optimizer_e.step()
    optimizer_d.step()
    scores = discriminator(torch.cat([encoder(x).detach(), torch.randn(8, 4)]))
    goal = torch.cat([torch.zeros(8, 1), torch.ones(8, 1)])
    nn.functional.binary_cross_entropy_with_logits(scores, goal).backward()
    optimizer_c.step()
