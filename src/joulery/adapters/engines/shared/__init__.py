"""One engine in a process of its own, shared by several gateways and steered by one controller."""
