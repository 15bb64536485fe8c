"""Keyed tables: samples that are found by key, written field by field at any time, and consumed by tasks that nobody
declared. They are part of a dock: the same ledger process keeps them, the same warehouses hold their bytes."""
