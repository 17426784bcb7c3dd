"""What sets devices: clocks, MIG partitions, MPS. One file a vendor surface; every change is whole or undone."""
