import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.command import Done, joulery

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "muserve-8gpu.yaml"


def simulate(*arguments: str | Path) -> Done:
    return joulery("simulate", *arguments)


def test_the_contract_and_ones_own_arrivals(tmp_path: Path) -> None:
    log, short = tmp_path / "log.parquet", tmp_path / "short.yaml"
    pq.write_table(pa.table({"t_s": [0.4 * n for n in range(500)]}), log)
    short.write_text(EXAMPLE.read_text().replace("duration: 1800 s", "duration: 60 s"))
    done = simulate(short, "--arrivals", log, "--seed", "3", "--policies", "fixed,predictive", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["arrivals"] == "log.parquet"
    assert [row["scheme"] for row in document["results"]] == ["fixed", "predictive"] * 2
    assert {"power_w", "attainment_ratio", "p99_normalised", "seed"} <= set(document["results"][0])
    table = simulate(short, "--seed", "3", "--policies", "fixed,predictive")
    assert "emulated" in table.stdout and "predictive" in table.stdout


def test_bad_flags(tmp_path: Path) -> None:
    for arguments, says in (
        (["--seed", "x"], "--seed needs a whole number"),
        (["--policies", "turbo"], "no such clock scheme"),
        (["--trace", "x.csv"], "takes no --trace"),
    ):
        done = simulate(EXAMPLE, *arguments)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
