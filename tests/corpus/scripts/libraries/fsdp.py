"""Fully sharded data parallel, each block a group of its own; here one process on its CPU."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

store = f"file://{tempfile.mkdtemp()}/store"
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)), nn.Linear(16, 2))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
del model, optimizer
dist.destroy_process_group()
