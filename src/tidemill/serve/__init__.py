"""An OpenAI-compatible endpoint: before a model for everybody, and before a run's rollout engine for its agents."""
