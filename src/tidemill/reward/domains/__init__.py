"""Verifiers of the generated domains. Each reads what its row's columns say, and gives the parts of its verdict."""
