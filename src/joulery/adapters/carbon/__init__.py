"""Sources of carbon intensity: files, three HTTP services, a typical day, stated values. One file a source.

Each source answers with gaps as NaN; :class:`~joulery.adapters.carbon.fill.Filled` turns them into an error or into the
fill the user asked for by name, and :class:`~joulery.adapters.carbon.cache.Cached` remembers settled history on disk.
"""
