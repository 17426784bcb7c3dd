"""Recorded runs: read, compare, account and replay them, and record them in the ledger."""
