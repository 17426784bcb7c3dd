"""Reports of recorded runs: record once, render many. Text, JSON, CSV and one self-contained HTML page.

A run must contain the following (``joulery.store.run.directory`` and ``joulery.store.run.timeline`` write and read it):

- ``report.json``: the keys of a footprint (``joulery.store.run.footprints``), and for a site also ``requests``,
  ``failed``, ``p95_s``, ``slo_s``, ``accuracy_ratio``, ``accuracy_source``, ``saving_ratio``, ``saving_low_ratio``,
  ``saving_high_ratio``, ``baseline`` (as text), ``variants`` (name to share of the answers), and ``charges``, a list
  of ``{"workload", "owner", "footprint"}``. Each is shown when it is there.
- ticks and decisions: the plots. A run without ticks is reported without plots; a run without ``report.json`` (killed)
  is reported from its ticks, and the report states so.
"""
