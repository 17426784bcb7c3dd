"""Site files with toy models, for tests of everything that runs a service."""

from pathlib import Path

TOYS = """\
joulery: 1
name: toys
mode: act
carbon: {{kind: typical, zone: GB, replay: {{day: "2020-10-14", duration: {replay}}}}}
meters: {{period: 50 ms, use: [cpu-model], cpu_model: {{idle: 20 W, max: 60 W}}}}
fleet: {{cpu: {{cores: 2}}}}
services:
  - name: sums
    owner: tests
    family:
      task: sums
      accuracy_metric: share of right sums
      variants:
        - {{name: small, accuracy: 75 %, accuracy_source: made up,
            model: {{kind: python, target: "tests.runtime.toy_models:Sum", options: {{busy_s: 0.002}}}}}}
        - {{name: large, accuracy: 80 %, accuracy_source: made up,
            model: {{kind: python, target: "tests.runtime.toy_models:Sum", options: {{busy_s: 0.006}}}}}}
    slo: {{latency: 500 ms}}
    policy: {{kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}}
serving: {{listen: "127.0.0.1:0", drain: 2 s}}
load: {{kind: poisson, rate: 30 /s, duration: {duration}, seed: 3}}
"""


def toy_site(
    folder: Path, *, duration: str = "3 s", replay: str = "3 s", changed: dict[str, str] | None = None
) -> Path:
    """The toy site as a file, with some of its text replaced."""
    text = TOYS.format(duration=duration, replay=replay)
    for old, new in (changed or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "site.yaml"
    path.write_text(text)
    return path
