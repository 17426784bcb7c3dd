"""Energy by operation as text, pages and exports."""
