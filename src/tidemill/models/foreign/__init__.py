"""Checkpoints of other frameworks, opened as a model to start from: weights alone, by their documented layouts."""
