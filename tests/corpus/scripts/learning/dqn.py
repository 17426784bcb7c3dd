"""Deep Q-learning: actions without gradients, a replay memory, and a target network that is copied now and then."""

import copy
import random

import torch
from torch import nn

policy_net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
target_net = copy.deepcopy(policy_net)
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
memory, state = [], torch.randn(4)
for number in range(24):
    with torch.no_grad():
        action = int(policy_net(state.unsqueeze(0)).argmax())
    following = state + 0.1 * torch.randn(4)
    memory.append((state, action, random.random(), following))
    state = following
    if len(memory) < 16:
        continue
    states, actions, rewards, followings = zip(*random.sample(memory, 8), strict=True)
    value = policy_net(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
    with torch.no_grad():
        goal = torch.tensor(rewards) + 0.99 * target_net(torch.stack(followings)).amax(1)
    loss = nn.functional.smooth_l1_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number % 4 == 0:
        target_net.load_state_dict(policy_net.state_dict())
