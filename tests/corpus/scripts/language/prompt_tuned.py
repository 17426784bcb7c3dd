"""Prompt tuning: a frozen transformer, and a few vectors before its input that are learned."""

import torch
from torch import nn


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.prompt, self.head = nn.Parameter(torch.randn(4, 16)), nn.Linear(16, 2)
        self.embed.requires_grad_(False)
        self.encoder.requires_grad_(False)

    def forward(self, ids):
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.embed(ids)], dim=1)
        return self.head(self.encoder(x).mean(1))


model = Prompted()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
for _ in range(8):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randint(0, 50, (4, 6))), torch.randint(0, 2, (4,))).backward()
    optimizer.step()
