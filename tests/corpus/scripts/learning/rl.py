"""REINFORCE: the policy is called once an action, and learns once an episode."""

import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x):
        return torch.softmax(self.affine2(torch.relu(self.affine1(x))), dim=1)


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for _episode in range(6):
    log_probs, rewards, state = [], [], torch.randn(1, 4)
    for _ in range(10):
        choice = Categorical(policy(state))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        rewards.append(float(action))
        state = state + 0.1 * torch.randn(1, 4)
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    optimizer.zero_grad()
    torch.cat([-log_prob * value for log_prob, value in zip(log_probs, returns, strict=True)]).sum().backward()
    optimizer.step()
