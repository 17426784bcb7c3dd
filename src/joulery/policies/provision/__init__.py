"""How many GPUs, which service beside which, how much of the GPU each, which batch: iGniter and better."""
