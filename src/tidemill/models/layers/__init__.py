"""A decoder's layers in other arithmetic: fused, batch-invariant, with 8-bit weights."""
