"""The studies of Smaragdine's section 6, on CPU, from random weights: each variant measured, then all compared.

    python examples/anatomy/study.py grid      eight sizes of BERT (6.1, Figure 9)
    python examples/anatomy/study.py albert    BERT against ALBERT (6.2, Figure 10)

A variant whose run is already there is not measured again: a study that was interrupted goes on. Needs torch and
transformers in the interpreter named by --python (this one, unless given).
"""

import argparse
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("pretrain.py")
GRID = {f"L{layers}-H{hidden}": ("bert", layers, hidden) for hidden in (512, 768) for layers in (6, 8, 10, 12)}
ALIKE = (
    "(?:Bert|Albert)ForPreTraining=ForPreTraining",
    "bert|albert=body",
    r"albert_layer_groups_\d+=transformer",
    r"layer_\d+=transformer",
    r"albert_layers_\d+|cls|self|dense=",
    "ffn=intermediate",
    "ffn_output=output",
)
"""What makes the names of BERT and ALBERT alike."""
ALBERT = {"bert": ("bert", 12, 768), "albert": ("albert", 12, 768)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["grid", "albert"])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--scale", type=float, default=1.0, help="of layers and hidden sizes, to try it out")
    parser.add_argument("--meter", action="append", default=[], help="as for joulery measure")
    chosen = parser.parse_args()
    joulery, runs = [sys.executable, "-m", "joulery"], []
    meters = [flag for meter in chosen.meter for flag in ("--meter", meter)]
    for name, (model, layers, hidden) in (GRID if chosen.study == "grid" else ALBERT).items():
        runs.append(str(chosen.out / f"{chosen.study}-{name}"))
        if Path(runs[-1], "report.json").exists():
            continue
        sizes = ["--layers", str(max(1, round(layers * chosen.scale)))]
        sizes += ["--hidden", str(max(64, round(hidden * chosen.scale / 64) * 64))]
        program = [chosen.python, "-W", "ignore", str(PROGRAM), "--model", model, *sizes, "--steps", "6"]
        schedule = ["--trace", "torch", "--steps", "skip=1,warmup=1,active=4,repeat=1"]
        subprocess.run([*joulery, "measure", *schedule, *meters, "--out", runs[-1], "--", *program], check=True)
    page = chosen.out / f"{chosen.study}.html"
    alike = [flag for pattern in (ALIKE if chosen.study == "albert" else ()) for flag in ("--pattern", pattern)]
    compare = [*joulery, "compare", *runs, *alike]
    subprocess.run([*compare, "--format", "html", "--out", str(page)], check=True)
    return subprocess.run([*compare, "--top", "10"]).returncode


if __name__ == "__main__":
    sys.exit(main())
