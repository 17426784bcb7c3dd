"""Soft actor-critic: three optimizers, one of a temperature; rollouts, target networks, evaluation in between."""

import copy

import torch
from torch import nn
from torch.nn import functional as F


def perceptron(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(8, 4)

    def forward(self, seen):
        mean, spread = self.net(seen).chunk(2, -1)
        chosen = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp())
        action = chosen.rsample()
        return action.tanh(), chosen.log_prob(action).sum(-1, keepdim=True)


actor, critic = Actor(), perceptron(10, 1)
target = copy.deepcopy(critic).requires_grad_(False)
heat = torch.zeros(1, requires_grad=True)
critics, actors = torch.optim.Adam(critic.parameters()), torch.optim.Adam(actor.parameters())
temperature = torch.optim.Adam([heat])
memory = []
for step in range(20):
    with torch.no_grad():
        action, _ = actor(torch.rand(8))
    memory.append((torch.rand(8), action, torch.rand(1), torch.rand(8)))
    if len(memory) < 10:
        continue
    seen, done, reward, then = (torch.stack(part) for part in zip(*memory[-10:], strict=True))
    with torch.no_grad():
        action, chance = actor(then)
        value = reward + 0.99 * (target(torch.cat([then, action], -1)) - heat.exp() * chance)
    critics.zero_grad()
    F.mse_loss(critic(torch.cat([seen, done], -1)), value).backward()
    critics.step()
    if step % 2:
        action, chance = actor(seen)
        actors.zero_grad()
        (heat.exp().detach() * chance - critic(torch.cat([seen, action], -1))).mean().backward()
        actors.step()
        temperature.zero_grad()
        (-heat * (chance.detach() - 4)).mean().backward()
        temperature.step()
    if step == 14:
        actor.eval()
        with torch.no_grad():
            for _ in range(5):
                actor(torch.rand(8))
        actor.train()
