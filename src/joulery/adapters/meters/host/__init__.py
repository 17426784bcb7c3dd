"""Meters of the whole host through its management controller or Slurm: slow sources, polled in the background."""
