"""From a site file to a plan."""
