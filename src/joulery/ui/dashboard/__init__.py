"""The dashboard: the screen "Now", live, from the latest :class:`~joulery.domain.serving.timeline.NowSnapshot` alone.

:func:`dashboard_routes` gives the Starlette routes; the caller mounts them and passes a function
that returns the latest snapshot. The page itself, ``/dashboard`` and ``/static/…``, holds no data; everything that does
is under ``/api/``, which a gateway with a token protects as a whole. The page prompts for the token and sends it.
"""

from joulery.ui.dashboard.routes import dashboard_routes

__all__ = ["dashboard_routes"]
