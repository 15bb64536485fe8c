"""Value models and how they are learned: a critic of PPO, or a reward model."""
