"""Live loops: the sampler, the controller, the actuator; ``compose`` is the only wiring."""
