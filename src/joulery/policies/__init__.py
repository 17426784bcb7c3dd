"""Pure decision rules for variants, layouts, provisioning, placement, clocks, ordering and training."""
