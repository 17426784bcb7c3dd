"""Virtual time: the event kernel, the simulated plant, scenarios, comparison."""
