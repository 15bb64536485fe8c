"""Parts of models that lie on several ranks, for learning and for rollout."""
