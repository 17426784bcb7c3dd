"""``joulery up``: everything of one site file on this machine, in front of a person."""
