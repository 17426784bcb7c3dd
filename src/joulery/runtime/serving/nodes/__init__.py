"""The nodes of a cluster while a site is served: metered and priced, ordered by their grids, asleep while empty."""
