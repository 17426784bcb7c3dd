"""A recommender: embeddings with sparse gradients have an optimizer beside that of the dense layers."""

import torch
from torch import nn


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(100, 8, mode="sum", sparse=True) for _ in range(3))
        self.top = nn.Sequential(nn.Linear(24 + 4, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, sparse):
        found = [bag(ids) for bag, ids in zip(self.bags, sparse, strict=True)]
        return self.top(torch.cat([dense, *found], dim=1)).squeeze(1)


model = Ranker()
sparse_optimizer = torch.optim.SparseAdam(list(model.bags.parameters()), lr=0.01)
dense_optimizer = torch.optim.Adagrad(model.top.parameters(), lr=0.01)
for _ in range(6):
    ids = [torch.randint(0, 100, (8, 3)) for _ in range(3)]
    loss = nn.functional.binary_cross_entropy_with_logits(model(torch.randn(8, 4), ids), torch.rand(8))
    sparse_optimizer.zero_grad()
    dense_optimizer.zero_grad()
    loss.backward()
    sparse_optimizer.step()
    dense_optimizer.step()
