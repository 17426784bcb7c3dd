"""One module a use case: reads the site file and wires adapters to live loops. Nothing below imports it."""
