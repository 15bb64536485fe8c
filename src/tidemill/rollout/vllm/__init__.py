"""vLLM behind the rollout interface, in this interpreter or in one of its own."""
