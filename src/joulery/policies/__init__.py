"""Decisions: variants, layouts, provisioning, placement, clocks, ordering, training. Pure."""
