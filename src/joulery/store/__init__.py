"""Storage: run directories, JSONL logs, Parquet series, the SQLite ledger, their versions and migrations."""
