"""The values that everything else uses: frozen, slotted, units in their names, no I/O.

Start with :mod:`~joulery.domain.energy.power` (what a meter saw), :mod:`~joulery.domain.energy.carbon` (what the grid
did), :mod:`~joulery.domain.energy.footprint` (what it cost), then :mod:`~joulery.domain.serving.service` (variants,
slices, SLOs), :mod:`~joulery.domain.decisions` (what a policy returns) and :mod:`~joulery.domain.ports` (what an
adapter must offer).
"""
