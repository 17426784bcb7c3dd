"""Speech recognition with connectionist temporal classification."""

import torch
from torch import nn


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gru = nn.Conv1d(8, 16, 3, stride=2), nn.GRU(16, 8, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, 12)

    def forward(self, x):
        hidden, _ = self.gru(self.conv(x).transpose(1, 2))
        return self.out(hidden).log_softmax(-1)


model, criterion = Recogniser(), nn.CTCLoss(zero_infinity=True)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(6):
    found = model(torch.randn(2, 8, 41)).transpose(0, 1)
    lengths = torch.full((2,), found.shape[0])
    loss = criterion(found, torch.randint(1, 12, (2, 4)), lengths, torch.full((2,), 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
