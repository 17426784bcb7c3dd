"""Sentence embeddings of a corpus, without gradients and without training."""

import torch
from torch import nn


class Sentences(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, ids, mask):
        hidden = self.encoder(self.embed(ids), src_key_padding_mask=~mask)
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


model, found = Sentences(), []
model.eval()
for _ in range(10):
    with torch.no_grad():
        found.append(model(torch.randint(0, 100, (4, 8)), torch.ones(4, 8, dtype=torch.bool)))
torch.cat(found)
