"""Frozen data classes and interfaces that all other packages use: units in the field names, no I/O.

Start with :mod:`~joulery.domain.energy.power` (readings of a meter), :mod:`~joulery.domain.energy.carbon` (carbon
intensity of the grid), :mod:`~joulery.domain.energy.footprint` (energy and carbon of a piece of work), then
:mod:`~joulery.domain.serving.service` (variants, slices, SLOs), :mod:`~joulery.domain.decisions` (results of a policy)
and :mod:`~joulery.domain.ports` (interfaces of the adapters).
"""
