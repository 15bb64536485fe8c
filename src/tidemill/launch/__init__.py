"""Start a recipe somewhere else: one file per target, one supervisor that runs on every node of any of them."""
