"""Meters of the whole host, answered by its management controller, its board or Slurm: slow, read in the background."""
