"""Which layouts on how many GPUs serve some services together: the column optimiser."""
