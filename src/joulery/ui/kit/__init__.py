"""What every page and table is made of: HTML, figures, numbers, consoles, progress."""
