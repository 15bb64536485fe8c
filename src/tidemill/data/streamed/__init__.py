"""Data larger than memory: rows are read where they lie, one at a time, and shuffled by arithmetic.

`stores.py` has the files, `rows.py` the examples, `shuffled.py` the order.
"""
