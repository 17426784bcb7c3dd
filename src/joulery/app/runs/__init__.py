"""Recorded runs: read, compared, accounted again, replayed, booked to the ledger."""
