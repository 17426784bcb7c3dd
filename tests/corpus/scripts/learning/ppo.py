"""Proximal policy optimisation: a rollout without gradients, then several epochs over its minibatches."""

import torch
from torch import nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def act(self, state, action=None):
        choice = Categorical(logits=self.actor(state))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), self.critic(state).squeeze(-1)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
for _update in range(2):
    states, actions, logs = [], [], []
    for _ in range(8):
        state = torch.randn(2, 4)
        with torch.no_grad():
            action, log, _ = agent.act(state)
        states.append(state), actions.append(action), logs.append(log)
    states, actions, logs = torch.cat(states), torch.cat(actions), torch.cat(logs)
    for _epoch in range(2):
        for rows in torch.randperm(16).split(8):
            _, log, value = agent.act(states[rows], actions[rows])
            ratio = (log - logs[rows]).exp()
            loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean() + 0.5 * (value - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
