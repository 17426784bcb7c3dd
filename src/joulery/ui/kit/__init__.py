"""Building blocks of pages and tables: HTML, charts, consoles, progress."""
