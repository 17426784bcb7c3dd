"""Programs profiled by their own framework, without joulery: ``python -m benchmarks._naming_programs KIND OUT``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 3


def torch_program(kind: str, out: Path) -> None:
    """Train a transformer of three layers under ``torch.profiler``; ``kind`` holds the options, joined by ``+``."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

    class Layer(nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            out: torch.Tensor = x + self.mlp(self.norm(x))
            return out

    class Model(nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
            self.layers = nn.ModuleList(Layer(64) for _ in range(3))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            logits: torch.Tensor = self.head(x)
            return logits

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, 100, (8, 64)), torch.randint(0, 100, (8 * 64,))

    torch.manual_seed(0)
    options = set(kind.split("+"))
    model: Any = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    if "compile" in options:
        model = torch.compile(model)
    if "ddp" in options:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)

    def train(after: Callable[[], None] = lambda: None) -> None:
        for _ in range(STEPS):
            ids, labels = batch()
            optimizer.zero_grad()
            functional.cross_entropy(model(ids).view(-1, 100), labels).backward()
            optimizer.step()
            after()

    def predict() -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                model(batch()[0]).argmax(-1)

    work = predict if "inference" in options else train
    work()
    flags = {
        "record_shapes": "shapes" in options,
        "with_stack": "stack" in options,
        "with_modules": "modules" in options,
    }
    if "tensorboard" in options:
        plan = schedule(wait=1, warmup=1, active=1)
        handler = tensorboard_trace_handler(str(out), use_gzip=True)
        with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=handler, **flags) as running:
            train(running.step)
        return
    with profile(activities=[ProfilerActivity.CPU], **flags) as finished:
        work()
    finished.export_chrome_trace(str(out / f"{os.environ.get('RANK', '0')}.json"))


def jax_program(kind: str, out: Path) -> None:
    """Train a perceptron without one ``named_scope``: as one compiled function, with a scan, or not compiled."""
    import jax
    import jax.numpy as jnp

    def layer(x: Any, w: Any) -> Any:
        return jax.nn.gelu(x @ w)

    def network(weights: Any, x: Any) -> Any:
        if kind == "scan":
            return jax.lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(weights))[0]
        for w in weights:
            x = layer(x, w)
        return x

    def loss(weights: Any, x: Any) -> Any:
        return -jax.nn.log_softmax(network(weights, x))[:, 0].mean()

    def step(weights: Any, x: Any) -> Any:
        grads = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    run = step if kind == "eager" else jax.jit(step)
    keys = jax.random.split(jax.random.PRNGKey(0), 5)
    weights, x = [jax.random.normal(key, (256, 256)) for key in keys[:4]], jax.random.normal(keys[4], (512, 256))
    jax.block_until_ready(run(weights, x))
    with jax.profiler.trace(str(out)):
        for _ in range(STEPS):
            weights = jax.block_until_ready(run(weights, x))


if __name__ == "__main__":
    framework, _, kind = sys.argv[1].partition(":")
    {"torch": torch_program, "jax": jax_program}[framework](kind, Path(sys.argv[2]))
