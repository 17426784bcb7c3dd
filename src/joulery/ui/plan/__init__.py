"""``joulery plan``: from a site file to a plan, and the plan as JSON, on the terminal and as a page."""
