"""Mixtures of experts: grouped products, and which token goes to which expert."""
