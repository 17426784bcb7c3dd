"""Small traced runs, made through the command line from plain tables."""

from pathlib import Path

import numpy as np

from joulery.ui.cli import main

LAYERS = ("embed", "layer_0/attention", "layer_0/ffn", "layer_1/attention", "layer_1/ffn", "head")


def make_run(folder: Path, name: str, *, seed: int = 0, scale: float = 1.0, steps: int = 20) -> Path:
    """A model of two self-similar layers: forward, backward, optimizer; a power meter every 4 ms."""
    rng = np.random.default_rng(seed)
    rows, at = ["op,start_ns,dur_ns,device,lane,phase"], 0
    for _ in range(steps):
        for phase, order in (("forward", LAYERS), ("backward", LAYERS[::-1])):
            for place, layer in enumerate(order):
                length = int(scale * (2 + place % 3) * 1e6 * rng.uniform(0.9, 1.1))
                rows.append(f"net/{layer},{at},{length},CPU:0,main,{phase}")
                rows.append(f"net/{layer}/mm,{at + length // 10},{length * 8 // 10},CPU:0,main,{phase}")
                at += length
        rows.append(f"SGD.step/add_,{at},{2_000_000},CPU:0,main,optimizer")
        at += 3_000_000
    power = ["t_ns,device,power_w"]
    power += [f"{t},CPU:0,{rng.uniform(40, 90):.3f}" for t in range(0, at, 4_000_000)]
    events, meter, run = (folder / f"{name}.{end}" for end in ("events.csv", "power.csv", "run"))
    events.write_text("\n".join(rows) + "\n")
    meter.write_text("\n".join(power) + "\n")
    assert main(["account", "--events", str(events), "--power", str(meter), "--out", str(run), "--json"]) == 0
    return run
