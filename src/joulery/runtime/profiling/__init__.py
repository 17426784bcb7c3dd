"""What variants cost on this machine's slices, shares and clocks, measured."""
