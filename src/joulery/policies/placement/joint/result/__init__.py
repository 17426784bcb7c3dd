"""From a solution in numbers to a plan: GPUs with named instances, and the certificate that others can check."""
