"""A vision transformer with label smoothing and mixed samples."""

import torch
from torch import nn


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.encoder(x)[:, 0])


model, criterion = ViT(), nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)
for _ in range(6):
    x, y = torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))
    mix = torch.rand(()).item()
    loss = criterion(model(mix * x + (1 - mix) * x.flip(0)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
