"""Tidemill's parts inside other frameworks: each file serves one of them, and is imported by name."""
