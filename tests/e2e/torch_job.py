"""A real PyTorch training as a batch job: it saves itself on SIGTERM and goes on bit by bit where it was.

``python torch_job.py EPOCHS [EPOCH_S]``. Model, optimiser and the generator that shuffles are in the checkpoint; a
finished job prints its last loss to the bit. Without Slurm around it, it runs straight through: the reference.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

epochs, epoch_s = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
job = os.environ.get("SLURM_JOB_ID", "alone")
gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "1")) * int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
stop: list[int] = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
torch.set_num_threads(1)
torch.manual_seed(7)
shuffle = torch.Generator().manual_seed(11)
inputs = torch.randn(512, 16)
labels = (inputs[:, :4].sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
file, epoch = Path(f"model.{job}.pt"), 0
if file.exists():
    kept = torch.load(file, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    shuffle.set_state(kept["shuffle"])
    torch.set_rng_state(kept["rng"])
    epoch = kept["epoch"]
print("start", epoch, "on", gpus, flush=True)
while epoch < epochs:
    total = 0.0
    for batch in torch.randperm(512, generator=shuffle).split(64):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        total += loss.item()
    if not Path("hurry").exists():
        time.sleep(epoch_s / gpus**0.8)  # a tiny model is trained in no time: as if it were a larger one
    epoch += 1
    content = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "shuffle": shuffle.get_state(),
        "rng": torch.get_rng_state(), "epoch": epoch, "loss": total,
    }  # fmt: skip
    torch.save(content, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)
    print("epoch", epoch, flush=True)
    if job != "alone":
        with Path(f"progress/{job}").open("a") as progress:
            progress.write(f"epoch {epoch}/{epochs}\n")
    if stop and epoch < epochs:
        print("saved", flush=True)
        sys.exit(0)
print("loss", torch.load(file, weights_only=True)["loss"].hex(), flush=True)
print("finished", flush=True)
