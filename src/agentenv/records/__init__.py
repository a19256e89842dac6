"""Durable records: the node's database and the ledger of host resources."""
