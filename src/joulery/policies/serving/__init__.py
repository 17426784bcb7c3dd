"""Choice of variants and slices as the grid changes (Clover)."""
