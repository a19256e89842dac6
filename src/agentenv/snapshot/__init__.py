"""Snapshots: their records, the files they consist of, and which of those are still needed."""
