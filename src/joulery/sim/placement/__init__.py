"""Plans judged by simulation: shared GPUs, standbys, pools."""
