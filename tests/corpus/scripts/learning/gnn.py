"""A graph convolution network, full batch; accuracy after each step of training."""

import torch
import torch.nn.functional as F
from torch import nn


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x, adjacency):
        return torch.sparse.mm(adjacency, x @ self.weight)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(16, 16), GraphConv(16, 3)

    def forward(self, x, adjacency):
        return F.log_softmax(self.gc2(F.relu(self.gc1(x, adjacency)), adjacency), dim=1)


nodes, labels = torch.randn(40, 16), torch.randint(0, 3, (40,))
adjacency = (torch.rand(40, 40) < 0.1).float().to_sparse()
model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for _ in range(6):
    model.train()
    optimizer.zero_grad()
    F.nll_loss(model(nodes, adjacency)[:20], labels[:20]).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(nodes, adjacency)[20:].argmax(dim=1)
