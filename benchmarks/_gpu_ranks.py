"""Training program of several ranks on one GPU (gloo), no joulery: ``torchrun --nproc-per-node 2 _gpu_ranks.py``."""

import os

import torch
import torch.distributed as dist
from torch import nn

WIDTH, ROWS, STEPS = (2048, 2048, 60) if torch.cuda.is_available() else (64, 32, 60)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = "cuda:0" if torch.cuda.is_available() else "cpu"
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(Block() for _ in range(3))).to(place))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(ROWS, WIDTH, device=place)).square().mean().backward()
        optimizer.step()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
