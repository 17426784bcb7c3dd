"""Derive the bundled typical day (src/joulery/adapters/carbon/typical_day.json) from the 2020 series.

Usage: python tools/typical_day.py FOLDER

FOLDER holds GB_2020_letswaitawhile.csv, FR_... and DE_... (timestamp_utc, ci_lifecycle; hourly), which come from
dos-group/lets-wait-awhile at commit 5e0d1553 (MIT): ENTSO-E generation by source times IPCC (2011) median life-cycle
emission factors. The result is the mean of each UTC hour in each month, rounded to 0.1 g/kWh.
"""

import csv
import json
import sys
from pathlib import Path

ZONES = ("GB", "FR", "DE")
TARGET = Path(__file__).parents[1] / "src/joulery/adapters/carbon/typical_day.json"
SOURCE = (
    "Mean of each UTC hour in each month of 2020, derived from the series of P. Wiesner et al., Let's Wait Awhile "
    "(Middleware 2021), github.com/dos-group/lets-wait-awhile: generation by source from the ENTSO-E Transparency "
    "Platform times the median life-cycle emission factors of IPCC (2011)"
)


def typical_day(path: Path) -> list[list[float]]:
    """Mean g/kWh by month and UTC hour, 12 rows of 24, rounded to 0.1."""
    cells: dict[tuple[int, int], list[float]] = {}
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            stamp = row["timestamp_utc"]
            cells.setdefault((int(stamp[5:7]), int(stamp[11:13])), []).append(float(row["ci_lifecycle"]))
    return [
        [round(sum(cells[month, hour]) / len(cells[month, hour]), 1) for hour in range(24)] for month in range(1, 13)
    ]


def render(folder: Path) -> str:
    """The resource as text, one month a line."""
    head = {"source": SOURCE, "licence": "MIT (lets-wait-awhile)", "unit": "g/kWh, life-cycle", "year": 2020}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    zones = []
    for zone in ZONES:
        months = typical_day(folder / f"{zone}_2020_letswaitawhile.csv")
        zones.append(f'    "{zone}": [\n' + ",\n".join(f"      {json.dumps(month)}" for month in months) + "\n    ]")
    return "\n".join(["{", *lines, '  "zones": {', ",\n".join(zones), "  }", "}"]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    TARGET.write_text(render(Path(sys.argv[1])), encoding="utf-8")
