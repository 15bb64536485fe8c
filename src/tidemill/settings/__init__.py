"""Settings as they are written, merged, explained and checked, before any model is loaded."""
