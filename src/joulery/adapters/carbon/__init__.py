"""Sources of carbon intensity: files, three HTTP services, a typical day, stated values. One module per source.

Each source returns gaps as NaN; :class:`~joulery.adapters.carbon.fill.Filled` raises an error for them or fills them by
the rule the user named, and :class:`~joulery.adapters.carbon.cache.Cached` keeps settled history on disk.
"""
