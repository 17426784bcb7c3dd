"""Direct preference optimisation: a policy and its frozen copy score the chosen and the rejected answer."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

policy = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 30))
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-4)


def score(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).sum((1, 2))


for _ in range(8):
    chosen, rejected = torch.randint(0, 30, (4, 8)), torch.randint(0, 30, (4, 8))
    with torch.no_grad():
        base = score(reference, chosen) - score(reference, rejected)
    loss = -F.logsigmoid(0.1 * (score(policy, chosen) - score(policy, rejected) - base)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
