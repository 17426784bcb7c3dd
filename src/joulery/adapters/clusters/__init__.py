"""Where training jobs run: this machine, Slurm."""
