"""Run plans: instances on their shares of GPUs, their standbys, and the change from one plan to the next."""
