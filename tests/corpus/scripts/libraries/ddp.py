"""Distributed data parallel with gradients kept back while they accumulate; here a group of one process."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

store = f"file://{tempfile.mkdtemp()}/store"
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    with model.no_sync():
        model(torch.randn(4, 8)).square().mean().backward()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
del model
dist.destroy_process_group()
