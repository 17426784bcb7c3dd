"""Which variants serve on which slices as the grid changes (Clover)."""
