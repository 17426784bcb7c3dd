"""The one site file: models, units, and errors that point at the line.

``load(path)`` reads it; :mod:`~joulery.config.site` says what it holds, one file a section. A new section is a
:class:`~joulery.config.parsing.section.Section` in its own file and one line in ``Site``.
"""

from joulery.config.parsing.reading import check, load, parse, schema
from joulery.config.site import Mode, Site

__all__ = ["Mode", "Site", "check", "load", "parse", "schema"]
